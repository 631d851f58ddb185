"""Streams and events of the simulated NPU, as torch.npu has them.

Work runs in program order whatever stream it is on, but for what stands behind a replay that waits
for an update. What streams have waited for is kept all the same: an update must stand behind the
last replay of its graph.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

import torch

from .extension import extension


class Stream:
    """A stream; capturing is per stream, and never on the default one."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.npu_stream: int = (
            kwargs["stream_id"] if "stream_id" in kwargs else extension().new_stream()
        )
        self.device = torch.device("npu", 0)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.npu_stream == self.npu_stream

    def __hash__(self) -> int:
        return hash(self.npu_stream)

    def __repr__(self) -> str:
        return f"<torch_npu.npu.Stream device={self.device} npu_stream={self.npu_stream:#x}>"

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        extension().synchronize()


_seen: dict[int, dict[int, int]] = {}
"""By stream, then by stream that it has waited for, directly or through others: the number of the
last event there.
"""


def stands_behind(stream: Stream, other: int, number: int) -> bool:
    """Whether what is launched on `stream` runs after the event `number` of the stream `other`, as
    far as streams have waited.
    """
    return _seen.get(stream.npu_stream, {}).get(other, 0) >= number


class Event:
    """A point in a stream. Recorded on a capturing stream, it brings the stream that waits for it
    into the capture.

    It is done once the host has waited for it, or for something later; one that was never recorded
    always is.
    """

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        self._captured = False
        self._seconds: float | None = None
        self._number = 0
        self._after: dict[int, int] = {}
        self._stalled_by = 0

    def record(self, stream: Stream | None = None) -> None:
        own = (stream or current_stream()).npu_stream
        self._number = extension().record_event()
        self._captured = extension().is_stream_capturing(own)
        self._after = _seen.get(own, {}) | {own: self._number}
        self._stalled_by = extension().stalled_by(own)
        self._seconds = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        own = (stream or current_stream()).npu_stream
        if self._captured:
            extension().join_capture(own)
        extension().stand_behind(self._stalled_by, own)
        seen = _seen.setdefault(own, {})
        seen.update(
            {other: max(number, seen.get(other, 0)) for other, number in self._after.items()}
        )

    def query(self) -> bool:
        done: bool = extension().is_event_done(self._number)
        return done

    def synchronize(self) -> None:
        if not self.query():
            extension().wait_for_event(self._number)

    def elapsed_time(self, end_event: Event) -> float:
        assert self._seconds is not None and end_event._seconds is not None, (
            "both events must be recorded"
        )
        return (end_event._seconds - self._seconds) * 1e3


class ExternalEvent:
    """An event that a graph waits for and another stream records; a graph resets it for its next
    replay.
    """

    def __init__(self) -> None:
        self._event = extension().ExternalEvent()

    def record(self, stream: Stream | None = None) -> None:
        self._event.record((stream or current_stream()).npu_stream)

    def wait(self, stream: Stream | None = None) -> None:
        self._event.wait()

    def reset(self, stream: Stream | None = None) -> None:
        self._event.reset()


class StreamContext:
    """Makes a stream the current one inside the block; None changes nothing."""

    def __init__(self, stream_ctx: Stream | None) -> None:
        self.stream = stream_ctx
        self._before = 0

    def __enter__(self) -> None:
        self._before = extension().current_stream()
        if self.stream is not None:
            extension().set_current_stream(self.stream.npu_stream)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        extension().set_current_stream(self._before)


def stream(stream: Stream | None) -> StreamContext:
    return StreamContext(stream)


def set_stream(stream: Stream) -> None:
    extension().set_current_stream(stream.npu_stream)


def current_stream(device: Any = None) -> Stream:
    return Stream(stream_id=extension().current_stream())


def default_stream(device: Any = None) -> Stream:
    return Stream(stream_id=0)
