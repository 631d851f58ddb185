"""Shared by all endpoint families: a request becomes sequences, and outputs become a stream."""
