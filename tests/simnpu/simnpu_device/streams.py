"""Streams and events of the simulated NPU, as torch.npu has them. Work runs in program order whatever stream it is on."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

import torch

from .extension import extension


class Stream:
    """A stream; capturing is per stream, and never on the default one."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.npu_stream: int = kwargs["stream_id"] if "stream_id" in kwargs else extension().new_stream()
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


class Event:
    """A point in a stream. Recorded on a capturing stream, it brings the stream that waits for it into the capture.

    It is done once the host has waited for it, or for something later; one that was never recorded always is.
    """

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._captured = False
        self._seconds: float | None = None
        self._number = 0

    def record(self, stream: Stream | None = None) -> None:
        self._number = extension().record_event()
        self._captured = extension().is_stream_capturing((stream or current_stream()).npu_stream)
        self._seconds = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        if self._captured:
            extension().join_capture((stream or current_stream()).npu_stream)

    def query(self) -> bool:
        done: bool = extension().is_event_done(self._number)
        return done

    def synchronize(self) -> None:
        if not self.query():
            extension().wait_for_event(self._number)

    def elapsed_time(self, end_event: Event) -> float:
        assert self._seconds is not None and end_event._seconds is not None, "both events must be recorded"
        return (end_event._seconds - self._seconds) * 1e3


class ExternalEvent:
    """An event that a graph waits for and the host records; a graph resets it for its next replay."""

    def __init__(self) -> None:
        self._event = extension().ExternalEvent()

    def record(self, stream: Stream | None = None) -> None:
        self._event.record()

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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        extension().set_current_stream(self._before)


def stream(stream: Stream | None) -> StreamContext:
    return StreamContext(stream)


def set_stream(stream: Stream) -> None:
    extension().set_current_stream(stream.npu_stream)


def current_stream(device: Any = None) -> Stream:
    return Stream(stream_id=extension().current_stream())


def default_stream(device: Any = None) -> Stream:
    return Stream(stream_id=0)
