"""NPU graphs whose kernels read lengths on the host: `NPUGraph.update` hands them over before each replay."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..graph import DeviceGraph, HostArguments

_capturing: UpdatedGraph | None = None


class UpdatedGraph(DeviceGraph):
    """Captured with torch_npu's `auto_dispatch_capture`, so that a replay waits for an update, which `replay` gives it.

    `torch.npu.graph` would enter torch_npu's dispatch mode around all that is captured. torch suspends a mode while it runs an
    op that the mode was handed, and with it whatever the op launches in turn; attention is such an op. So `updatable`, inside of
    it, enters the mode. Only one capture at a time can go on in a process.

    `event`: a new `torch.npu.Event`.
    """

    def __init__(self, graph: Any, stream_context: Any, error_mode: str, host_arguments: HostArguments, event: Any) -> None:
        super().__init__(graph, stream_context, error_mode)
        graph.auto_dispatch_capture = True
        self._host_arguments = host_arguments
        self._replayed = event

    def begin(self, pool: Any, stream: Any) -> None:
        global _capturing
        super().begin(pool, stream)
        _capturing = self

    def end(self) -> None:
        global _capturing
        _capturing = None
        super().end()

    def replay(self) -> None:
        # An update writes into the graph's own launches, so one that still runs would go on with the lengths of the next step.
        self._replayed.synchronize()
        self._graph.update(cpu_update_input=[dict(self._host_arguments())])
        super().replay()
        self._replayed.record()

    @property
    def dispatch_mode(self) -> AbstractContextManager[Any]:
        mode: AbstractContextManager[Any] = self._graph.graph_dispatch_mode
        return mode


def updatable() -> AbstractContextManager[Any]:
    """What is launched inside the block gets its numbers from `UpdatedGraph.replay`, where such a graph is being captured."""
    return nullcontext() if _capturing is None else _capturing.dispatch_mode
