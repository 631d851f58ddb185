"""Clients and measurements."""
