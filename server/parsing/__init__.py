"""Tool calls out of a model's text, and into it."""
