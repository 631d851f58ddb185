"""NPUGraph and its capture context, with torch_npu's signatures, order of steps and ways to fail."""

from __future__ import annotations

from copy import deepcopy
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from .extension import extension
from .streams import ExternalEvent, Stream, StreamContext, current_stream

PoolId = tuple[int, int]

UPDATABLE: dict[str, dict[int, str]] = {
    "npu_fused_infer_attention_score.default": {},
    "_npu_paged_attention.default": {7: "context_lens"},
}
"""Ops whose lengths `update` replaces: those passed by keyword under their names, those passed by position under these."""


def is_current_stream_capturing() -> bool:
    return bool(extension().is_capturing())


def graph_pool_handle() -> PoolId:
    pool: PoolId = extension().new_pool_id()
    return pool


def graph_task_group_begin(stream: Stream) -> None:
    extension().begin_task_group()


def graph_task_group_end(stream: Stream) -> Any:
    return extension().end_task_group()


def graph_task_update_begin(stream: Stream, handle: Any) -> None:
    extension().begin_task_update(handle)


def graph_task_update_end(stream: Stream) -> None:
    extension().end_task_update()


class _Record(NamedTuple):
    """One updatable launch. Tensors are held weakly, as the graph holds their addresses."""

    event: ExternalEvent
    group: Any
    op: Any
    args: list[Any]
    kwargs: dict[str, Any]


class _DispatchMode(TorchDispatchMode):
    """Wraps updatable launches of a capture in a task group behind an event, which only `update` records."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[_Record] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.__name__ not in UPDATABLE:
            return func(*args, **kwargs)
        stream, event = current_stream(), ExternalEvent()
        event.wait(stream)
        event.reset(stream)
        graph_task_group_begin(stream)
        result = func(*args, **kwargs)
        group = graph_task_group_end(stream)
        self.records.append(_Record(event, group, func, list(tree_map(_hold, args)), tree_map(_hold, kwargs)))
        return result

    def update(self, cpu_update_input: list[dict[str, Any]]) -> None:
        if len(cpu_update_input) == 1:
            cpu_update_input = cpu_update_input * len(self.records)
        if len(cpu_update_input) != len(self.records):
            raise RuntimeError(
                f"Currently, there are {len(self.records)} operators that need to be updated by capture, and there are only "
                f"{len(cpu_update_input)} elements in the incoming cpu_update_input list"
            )
        for record, values in zip(self.records, cpu_update_input, strict=True):
            _update(record, values)


def _hold(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.device.type == "npu":
        return extension().weak_reference(value)
    return deepcopy(value)


def _update(record: _Record, values: dict[str, Any]) -> None:
    """Names that the op was not given at capture are ignored, as torch_npu does."""
    record.kwargs.update({name: value for name, value in values.items() if name in record.kwargs})
    for position, name in UPDATABLE[record.op.__name__].items():
        if name in values and position < len(record.args):
            record.args[position] = values[name]
    stream = current_stream()
    graph_task_update_begin(stream, record.group)
    try:
        record.op(*record.args, **record.kwargs)
    except BaseException:
        extension().abort_task_update()
        raise
    graph_task_update_end(stream)
    record.event.record(stream)


def make_graph_class() -> type:
    """NPUGraph, whose base class exists once the extension is loaded."""

    class NPUGraph(extension().Graph):  # type: ignore[misc]
        """A captured graph: replays its launches on the addresses of the moment of capture."""

        def __init__(self) -> None:
            super().__init__()
            self.auto_dispatch_capture = False
            self.graph_dispatch_mode = _DispatchMode()
            self._replayed = 0

        def capture_begin(self, pool: PoolId | None = None, capture_error_mode: str = "global") -> None:
            super().capture_begin(pool, capture_error_mode)

        def capture_end(self) -> None:
            super().capture_end()

        def replay(self) -> None:
            """Raises RuntimeError where hardware would hang: an update is missing."""
            super().replay()
            self._replayed = extension().record_event()

        def reset(self) -> None:
            super().reset()

        def pool(self) -> PoolId:
            pool: PoolId = super().pool()
            return pool

        def update(self, cpu_update_input: list[dict[str, Any]]) -> None:
            """New lengths for the next replay: a dict for each updatable launch in order, or one for all of them.

            Raises RuntimeError where hardware may give them to a replay that still runs: the host has not waited for the last one.
            """
            if not self.auto_dispatch_capture:
                raise RuntimeError(
                    "The current graph configuration does not support update,"
                    "Try to capture by setting auto_dispatch_capture=True during capture"
                )
            if not extension().is_event_done(self._replayed):
                raise RuntimeError("simnpu: a graph is updated while, as far as the host knows, a replay of it still runs")
            self.graph_dispatch_mode.update(cpu_update_input)

    return NPUGraph


class graph:
    """Captures what the block launches. A failing block still ends the capture, and an invalidated capture raises there.

    As in torch_npu, where ending the capture raises, the stream (and the dispatch mode) of the block stay current.
    """

    default_capture_stream: Stream | None = None

    def __init__(
        self,
        npu_graph: Any,
        pool: PoolId | None = None,
        stream: Stream | None = None,
        auto_dispatch_capture: bool = False,
        capture_error_mode: str = "global",
    ) -> None:
        if graph.default_capture_stream is None:
            graph.default_capture_stream = Stream()
        self.pool = pool
        self.capture_stream = stream if stream is not None else graph.default_capture_stream
        self.stream_ctx = StreamContext(self.capture_stream)
        self.npu_graph = npu_graph
        self.capture_error_mode = capture_error_mode
        self.npu_graph.auto_dispatch_capture = auto_dispatch_capture

    def __enter__(self) -> None:
        extension().synchronize()
        extension().empty_cache()
        self.stream_ctx.__enter__()
        if self.npu_graph.auto_dispatch_capture:
            self.npu_graph.graph_dispatch_mode.__enter__()
        self.npu_graph.capture_begin(self.pool, capture_error_mode=self.capture_error_mode)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.npu_graph.capture_end()
        if self.npu_graph.auto_dispatch_capture:
            self.npu_graph.graph_dispatch_mode.__exit__(kind, error, trace)
        self.stream_ctx.__exit__(kind, error, trace)
