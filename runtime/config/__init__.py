"""The configuration of an engine and of a model, and the registries of models and formats."""
