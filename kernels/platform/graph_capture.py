"""Graphs of a device, which replay launches without the host's work for them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..graph import Graph, HostArguments, weak_ref_tensor
from .memory import Memory


class GraphCapture(Memory):
    """What captures graphs, into pools of the device's memory.

    graph, pool = capture.graph(), capture.graph_pool()
    graph.capture(work, pool, capture.graph_stream())
    graph.replay()
    """

    # Whether a graph captures launches. If not, a graph can only call its work again, and the work
    # must be a callable.
    graphs_are_real: bool = True
    # Most graphs that may exist at once. None: as many as fit the memory.
    graph_budget: int | None = None
    # A step is padded to a captured size up to this multiple of its tokens.
    padding_limit: float = 2.0

    def graph(self, host_arguments: HostArguments | None = None) -> Graph:
        """Return a new graph. `host_arguments` is called before each replay. None: all that changes
        lies in tensors.
        """
        raise NotImplementedError

    def graph_pool(self) -> Any:
        """Return a handle of memory for graphs that are replayed in the order of their captures."""
        raise NotImplementedError

    def abandon_graph_pool(self, pool: Any) -> None:
        """Free what a failed capture left in a pool. Its graphs stay, but nothing may be captured
        into it any more.
        """

    def graph_bytes(self, pool: Any) -> int:
        """Return the bytes that the graphs of a pool take, including their outputs."""
        raise NotImplementedError

    def graph_stream(self) -> Any:
        """Return a stream for warm-up and captures, separate from the serving stream. None if the
        device has no streams.
        """
        return None

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Launch on `stream` inside the block: after earlier work, and before later work."""
        return nullcontext()

    def weak_ref_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the same memory that does not keep the memory alive."""
        return weak_ref_tensor(tensor)
