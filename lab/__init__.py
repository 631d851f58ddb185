"""Experiments and one-off measurements. Not packaged: they run from a checkout."""
