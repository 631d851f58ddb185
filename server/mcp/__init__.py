"""Connections to MCP servers, which run tools for a model."""
