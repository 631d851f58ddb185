"""Changes to the whole traced forward, before it is cut into pieces."""
