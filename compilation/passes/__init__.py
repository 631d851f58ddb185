"""Changes to the whole traced forward before it is split into pieces."""
