"""Cached prefixes that clients want kept for a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

# Added to the last use of what is pinned, so that everything else is evicted first.
LAST = 2**62


class Clock:
    """The time by which pins end.

    It is the arrival of the newest request, in seconds. All ranks of an engine thus agree on it.
    """

    now = 0.0


class Pinnable(Protocol):
    """A node of the prefix tree, or a block."""

    @property
    def num_pages(self) -> int: ...


T = TypeVar("T", bound=Pinnable)


class Pins(Generic[T]):
    """The pinned nodes or blocks, which are evicted after all others.

    All of them together have at most `most` pages. Beyond that, those that were pinned least
    recently lose their pin.

    >>> pins.keep(node, seconds=300)
    >>> node in pins  # Another node is evicted if there is one.
    >>> pins.ended()  # Nodes that may be evicted like others again.
    """

    def __init__(self, most: int, clock: Clock) -> None:
        self.pages = 0
        self._most, self._clock = most, clock
        self._until: dict[T, float] = {}  # By the time of the last pin.
        self._first_end = math.inf  # No pin ends before.

    def __contains__(self, item: T) -> bool:
        return item in self._until

    def __iter__(self) -> Iterator[T]:
        return iter(self._until)

    def keep(self, item: T, seconds: float) -> None:
        """Pin for at least this time from now on."""
        until = max(self._clock.now + seconds, self.drop(item))
        self._add(item, until)

    def inherit(self, item: T, source: T) -> None:
        """Pin pages that were a part of `source`, as long as `source`. It has lost them already."""
        if source in self._until:
            self.pages -= item.num_pages
            self._add(item, self._until[source])

    def drop(self, item: T) -> float:
        """End a pin, if there is one. Return when it would have ended."""
        until = self._until.pop(item, None)
        if until is None:
            return 0.0
        self.pages -= item.num_pages
        return until

    def shrink(self, item: T, pages: int) -> None:
        """Record that `item` is about to lose so many pages."""
        if item in self._until:
            self.pages -= pages

    def ended(self) -> list[T]:
        """Return what is not pinned any more, least recently pinned first."""
        found: list[T] = []
        while self.pages > self._most:
            found.append(next(iter(self._until)))
            self.drop(found[-1])
        if self._clock.now >= self._first_end:
            over = [item for item, until in self._until.items() if until <= self._clock.now]
            for item in over:
                self.drop(item)
            found += over
            self._first_end = min(self._until.values(), default=math.inf)
        return found

    def _add(self, item: T, until: float) -> None:
        self._until[item] = until
        self._first_end = min(self._first_end, until)
        self.pages += item.num_pages
