"""A response that is generated in the background, with or without readers of its events."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol

from ...serving.collector import Collector
from .items import Item
from .live import LiveResponse
from .output import ResponseEvent

MAX_EVENT_BYTES = 4 * 2**20  # Maximum size of the stored events of one stream, in bytes.


class Encoder(Protocol):
    """Encodes the events of a response."""

    def opening(self, *kinds: str) -> list[bytes]: ...

    def write(self, events: Iterable[ResponseEvent]) -> list[bytes]: ...

    def last(self) -> list[bytes]: ...


class Job:
    """A response in the background.

    Attributes:
        events: The events up to now, if the job is streamed.
        ends_with_client: Whether the job is cancelled if its client disconnects.
        is_cut: Whether the events took more than `MAX_EVENT_BYTES` bytes and were dropped.
        news: Set, and replaced, when there are new events or the job has ended.
    """

    def __init__(
        self,
        answer: LiveResponse,
        items: list[Item],
        collector: Collector | None,
        encoder: Encoder | None,
        *,
        ends_with_client: bool = False,
    ) -> None:
        self.answer = answer
        self.items = items
        self.collector = collector
        self.ends_with_client = ends_with_client
        self.is_streamed = encoder is not None
        self.events: list[bytes] = []
        self.is_cut = False
        self.goes_on = True
        self.news = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self._encoder = encoder
        self._bytes = 0
        if encoder is not None:
            self._add(encoder.opening("created", *([] if ends_with_client else ["queued"])))

    @property
    def weight(self) -> int:
        """Upper limit of the memory that the job takes, in bytes."""
        if not self.goes_on:
            return self.answer.size + self._bytes if self.events else 0
        return self.answer.size + (MAX_EVENT_BYTES if self.is_streamed else 0)

    async def run(self) -> None:
        if self.collector is not None:
            await self.collect(self.collector)

    async def collect(self, collector: Collector) -> None:
        """Read all output of a collector."""
        while updates := await collector.next():
            self.emit(event for _, output in updates for event in self.answer.push(output))

    def emit(self, events: Iterable[ResponseEvent]) -> None:
        """Keep events for the readers. Without readers, only make them."""
        if self._encoder is not None:
            self._add(self._encoder.write(events))
        else:
            for _ in events:
                pass

    def end(self) -> None:
        """Handle the end of the job, after the answer has its last state."""
        self.goes_on = False
        self._add([] if self._encoder is None else self._encoder.last())

    def forget(self) -> None:
        """Drop the events. Readers that have started keep theirs."""
        self.events = []

    def _add(self, events: list[bytes]) -> None:
        self.events += events
        self._bytes += sum(map(len, events))
        if self._bytes > MAX_EVENT_BYTES:
            self.events, self._encoder, self.is_cut = [], None, True
        news, self.news = self.news, asyncio.Event()
        news.set()
