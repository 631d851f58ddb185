"""NPU graphs whose kernels read lengths on the host: `NPUGraph.update` hands them over while the
replay is under way.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..graph import DeviceGraph, HostArguments

_capturing: UpdatedGraph | None = None


class UpdatedGraph(DeviceGraph):
    """Captured with torch_npu's `auto_dispatch_capture`, so that its attention kernels wait for an
    update, which `replay` gives them.

    `torch.npu.graph` would enter torch_npu's dispatch mode around all that is captured. torch
    suspends a mode while it runs an op that the mode was handed, and with it whatever the op
    launches in turn; attention is such an op. So `updatable`, inside of it, enters the mode. Only
    one capture at a time can go on in a process.

    `npu`: `torch.npu`.
    """

    def __init__(
        self, graph: Any, error_mode: str, host_arguments: HostArguments, npu: Any
    ) -> None:
        super().__init__(graph, npu.stream, error_mode)
        graph.auto_dispatch_capture = True
        self._host_arguments, self._npu = host_arguments, npu

    def begin(self, pool: Any, stream: Any) -> None:
        global _capturing
        super().begin(pool, stream)
        _capturing = self

    def end(self) -> None:
        global _capturing
        _capturing = None
        super().end()

    def replay(self) -> None:
        """The replay is launched first: the device is at work on what comes before attention while
        the host updates layer after layer.

        torch_npu launches updates on a stream of their own. They write into the graph's own
        launches, so that stream waits for all that was launched before the replay, the last replay
        among it; behind the replay it would wait for what waits for it.
        """
        values, mode = dict(self._host_arguments()), self._graph.graph_dispatch_mode
        before = self._npu.current_stream().record_event()
        mode.update_stream.wait_event(before)
        super().replay()
        try:
            self._graph.update(cpu_update_input=[values])
        except BaseException:
            self._let_go(mode.graph_dispatch_records, before)
            raise

    def _let_go(self, records: Any, before: Any) -> None:
        """End a replay whose update failed: it would wait for ever, and the device with it. What it
        computes is thrown away.
        """
        # The other stream may be in the midst of an update.
        stream = self._npu.Stream()
        stream.wait_event(before)
        for record in records:
            record.event.record(stream)

    @property
    def dispatch_mode(self) -> AbstractContextManager[Any]:
        mode: AbstractContextManager[Any] = self._graph.graph_dispatch_mode
        return mode


def updatable() -> AbstractContextManager[Any]:
    """What is launched inside the block gets its numbers from `UpdatedGraph.replay`, where such a
    graph is being captured.
    """
    return nullcontext() if _capturing is None else _capturing.dispatch_mode
