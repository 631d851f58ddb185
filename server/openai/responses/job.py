"""A response that is made in the background, whether or not somebody reads along."""

from __future__ import annotations

import asyncio
from typing import Protocol

from ...serving.collector import Collector, Update
from .answer import Answer
from .items import Item

MAX_TOLD = 4 * 2**20
"""Bytes of events that are kept of one stream."""


class Events(Protocol):
    """Encodes the events of a response."""

    def opening(self, *kinds: str) -> list[bytes]: ...

    def told(self, updates: list[Update]) -> list[bytes]: ...

    def last(self) -> list[bytes]: ...


class Job:
    """`told`: the events so far, of a job that is streamed; where they take more than `MAX_TOLD`
    none are kept, and it `is_cut`. `news` is set, and replaced, when there are more, or no more.
    """

    def __init__(
        self, answer: Answer, items: list[Item], collector: Collector, events: Events | None
    ) -> None:
        self.answer = answer
        self.items = items
        self.collector = collector
        self.is_streamed = events is not None
        self.told: list[bytes] = []
        self.is_cut = False
        self.goes_on = True
        self.news = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self._events = events
        self._bytes = 0
        if events is not None:
            self._tell(events.opening("created", "queued"))

    @property
    def weight(self) -> int:
        """Bytes of memory that it may take."""
        if not self.goes_on:
            return self.answer.size + self._bytes if self.told else 0
        return self.answer.size + (MAX_TOLD if self.is_streamed else 0)

    async def run(self) -> None:
        while updates := await self.collector.next():
            if self._events is not None:
                self._tell(self._events.told(updates))
                continue
            for _, output in updates:
                for _ in self.answer.push(output):
                    pass

    def end(self) -> None:
        """The answer has its last state."""
        self.goes_on = False
        self._tell([] if self._events is None else self._events.last())

    def forget(self) -> None:
        """Nobody begins to read the events any more; who reads them goes on."""
        self.told = []

    def _tell(self, events: list[bytes]) -> None:
        self.told += events
        self._bytes += sum(map(len, events))
        if self._bytes > MAX_TOLD:
            self.told, self._events, self.is_cut = [], None, True
        news, self.news = self.news, asyncio.Event()
        news.set()
