"""NPU graphs whose kernels read lengths on the host. `NPUGraph.update` passes the lengths during
the replay.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..graph import DeviceGraph, HostArguments

_capturing: UpdatedGraph | None = None


class UpdatedGraph(DeviceGraph):
    """A graph captured with torch_npu's `auto_dispatch_capture`. Its attention kernels wait for an
    update by `replay`.

    `torch.npu.graph` enters torch_npu's dispatch mode around the whole capture. torch suspends a
    mode while an op runs that the mode handles, and so does not see what the op launches. Attention
    is such an op. Therefore `updatable` enters the mode inside the op. Only one capture at a time
    is possible in a process.

    `npu` is `torch.npu`.
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
        """Launch the replay first. The device computes what comes before attention while the host
        updates layer after layer.

        torch_npu launches updates on a separate stream. They write into the graph's own launches,
        so that stream waits for all work launched before the replay, including the last replay. If
        it waited for the replay too, both would wait for each other.
        """
        values, mode = dict(self._host_arguments()), self._graph.graph_dispatch_mode
        before = self._npu.current_stream().record_event()
        mode.update_stream.wait_event(before)
        super().replay()
        try:
            self._graph.update(cpu_update_input=[values])
        except BaseException:
            self._abort(mode.graph_dispatch_records, before)
            raise

    def _abort(self, records: Any, before: Any) -> None:
        """End a replay whose update failed, because it would hang, and the device with it. Its
        results are dropped.
        """
        # The update stream may still be in an update, so use a new one.
        stream = self._npu.Stream()
        stream.wait_event(before)
        for record in records:
            record.event.record(stream)

    @property
    def dispatch_mode(self) -> AbstractContextManager[Any]:
        mode: AbstractContextManager[Any] = self._graph.graph_dispatch_mode
        return mode


def updatable() -> AbstractContextManager[Any]:
    """Pass host values to what is launched inside the block by `UpdatedGraph.replay`, if such a
    graph is being captured.
    """
    return nullcontext() if _capturing is None else _capturing.dispatch_mode
