"""Connections to servers that clients name, to one checked address each."""
