"""Several models in one server: a web process, and an engine process for each model."""
