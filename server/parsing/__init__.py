"""Parses tool calls and thoughts in a model's text, and writes calls as such text."""
