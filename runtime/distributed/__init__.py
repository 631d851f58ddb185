"""Runs one engine in several processes."""
