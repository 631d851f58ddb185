"""The only door to the runtime: supervised engine processes and their unfinished requests."""
