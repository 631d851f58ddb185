"""Metrics, traces and the record of each request."""
