"""The models as mathematics."""
