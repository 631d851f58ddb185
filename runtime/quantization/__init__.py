"""How weights are kept and multiplied."""
