"""Errors between a forward and its graphs. None of them reaches a client: the step runs eagerly."""

from __future__ import annotations


class GraphError(Exception):
    """A forward, or a part of it, cannot become graphs."""


class TraceError(GraphError):
    """The forward has no single graph for all numbers of tokens. It runs without pieces."""


class CompileError(GraphError):
    """A piece cannot be compiled. It runs as it was traced."""


class NotStoredError(GraphError):
    """The compile cache lacks a part of the forward. A serving process runs without pieces."""


class CaptureError(GraphError):
    """A size cannot be recorded, or its replay is wrong. It runs without a graph."""
