"""Logits become tokens."""
