"""What can go wrong between a forward and its graphs. None of it reaches a client: the step
runs eagerly.
"""

from __future__ import annotations


class GraphError(Exception):
    """A forward, or a part of it, cannot become graphs."""


class TraceError(GraphError):
    """The forward cannot be taken as one graph that is right for every number of tokens; it runs
    without pieces.
    """


class CompileError(GraphError):
    """A piece cannot be compiled; it runs as it was traced."""


class NotStoredError(GraphError):
    """The compile cache lacks a part of the forward; a process that serves runs without pieces."""


class CaptureError(GraphError):
    """A size cannot be recorded, or its replay is wrong; it runs without a graph."""
