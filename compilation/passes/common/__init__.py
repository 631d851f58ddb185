"""Passes for every platform."""
