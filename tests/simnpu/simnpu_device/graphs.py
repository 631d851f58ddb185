"""NPUGraph and its capture context, with torch_npu's signatures, order of steps and ways to
fail.
"""

from __future__ import annotations

from copy import deepcopy
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from .device import get_task_queue_enable
from .extension import extension
from .streams import ExternalEvent, Stream, StreamContext, current_stream, stands_behind

PoolId = tuple[int, int]

UPDATABLE: dict[str, dict[int, str]] = {
    "npu_fused_infer_attention_score.default": {},
    "_npu_paged_attention.default": {7: "context_lens"},
}
"""Ops whose lengths `update` replaces: those passed by keyword under their names, those passed by
position under these.
"""


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
    extension().wait_if_behind_stall(stream.npu_stream, "an update")
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
    """Wraps updatable launches of a capture in a task group behind an event, which only `update`
    records, on a stream of its own.
    """

    update_stream: Stream

    def __new__(cls) -> _DispatchMode:
        if not hasattr(cls, "update_stream"):
            cls.update_stream = Stream()
        return super().__new__(cls)

    def __init__(self) -> None:
        super().__init__()
        self.graph_dispatch_records: list[_Record] = []

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
        self.graph_dispatch_records.append(
            _Record(event, group, func, list(tree_map(_hold, args)), tree_map(_hold, kwargs))
        )
        return result

    def update(self, cpu_update_input: list[dict[str, Any]]) -> None:
        records = self.graph_dispatch_records
        if len(cpu_update_input) == 1:
            cpu_update_input = cpu_update_input * len(records)
        if len(cpu_update_input) != len(records):
            raise RuntimeError(
                f"Currently, there are {len(records)} operators that need to be updated by "
                "capture, and there are only "
                f"{len(cpu_update_input)} elements in the incoming cpu_update_input list"
            )
        with StreamContext(self.update_stream):
            for record, values in zip(records, cpu_update_input, strict=True):
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
            self._replays: list[tuple[int, int]] = []
            self._updates = 0

        def capture_begin(
            self, pool: PoolId | None = None, capture_error_mode: str = "global"
        ) -> None:
            if get_task_queue_enable() == 2:
                raise RuntimeError(
                    "Do not support TASK_QUEUE_ENABLE = 2 during NPU graph capture, please export "
                    "TASK_QUEUE_ENABLE=1/0."
                )
            super().capture_begin(pool, capture_error_mode)

        def capture_end(self) -> None:
            super().capture_end()

        def replay(self) -> None:
            """It stops before the first launch whose update has not come, and goes on when it
            comes.

            Meanwhile whatever is launched behind it, on its stream or on one that waits for that,
            waits for the update too, and so does whoever waits for the device: where hardware would
            hang, RuntimeError after `hang_seconds`.
            """
            super().replay()
            self._replays.append((current_stream().npu_stream, extension().record_event()))

        def reset(self) -> None:
            super().reset()

        def pool(self) -> PoolId:
            pool: PoolId = super().pool()
            return pool

        def update(self, cpu_update_input: list[dict[str, Any]]) -> None:
            """New lengths for the first replay that has none, under way or not: a dict for each
            updatable launch in order, or one for all.

            Raises RuntimeError where hardware may give them to the replay before: neither has the
            host waited for that, nor the stream of the updates.
            """
            if not self.auto_dispatch_capture:
                raise RuntimeError(
                    "The current graph configuration does not support update,"
                    "Try to capture by setting auto_dispatch_capture=True during capture"
                )
            stream, number = (
                self._replays[self._updates - 1]
                if 0 < self._updates <= len(self._replays)
                else (0, 0)
            )
            if not extension().is_event_done(number) and not stands_behind(
                self.graph_dispatch_mode.update_stream, stream, number
            ):
                raise RuntimeError(
                    "simnpu: a graph is updated while, as far as the host and its streams know, a "
                    "replay of it still runs"
                )
            self.graph_dispatch_mode.update(cpu_update_input)
            self._updates += 1

    return NPUGraph


class graph:
    """Captures what the block launches. A failing block still ends the capture, and an invalidated
    capture raises there.

    As in torch_npu, where ending the capture raises, the stream (and the dispatch mode) of the
    block stay current.
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.npu_graph.capture_end()
        if self.npu_graph.auto_dispatch_capture:
            self.npu_graph.graph_dispatch_mode.__exit__(kind, error, trace)
        self.stream_ctx.__exit__(kind, error, trace)
