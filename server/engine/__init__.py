"""The only door to the runtime: an engine process, kept alive, and what it has been asked."""
