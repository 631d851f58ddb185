"""Access control: API keys, their limits, and pages of other origins."""
