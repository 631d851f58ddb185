"""Who may ask: keys, their limits, and pages of other origins."""
