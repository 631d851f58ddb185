"""Attacks on a running server."""
