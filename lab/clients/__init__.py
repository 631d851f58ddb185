"""Installs client programs and runs a session of each against a tiny model."""
