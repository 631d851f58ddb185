"""What can go wrong between a forward and its graphs. None of it reaches a client: whoever catches
it runs eagerly.

GraphError ├── TraceError the forward cannot be taken as one graph; the phase runs without pieces
├── CompileError a piece cannot be compiled; it runs as it was traced ├── NotStoredError the compile
cache lacks a part of the forward; a process that serves runs without pieces └── CaptureError a size
cannot be recorded; it runs without a graph
"""

from __future__ import annotations


class GraphError(Exception):
    """A forward, or a part of it, cannot become graphs."""


class TraceError(GraphError):
    """The forward cannot be taken as one graph that is right for every number of tokens."""


class CompileError(GraphError):
    """A piece cannot be compiled."""


class NotStoredError(GraphError):
    """The compile cache does not hold all that a forward in pieces needs."""


class CaptureError(GraphError):
    """A size cannot be recorded, or its replay is wrong."""
