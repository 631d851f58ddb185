"""Piecework as an application of Ray Serve."""
