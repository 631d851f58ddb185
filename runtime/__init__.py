"""Requests become tokens."""
