"""Cached prefixes that clients want kept for a time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Generic, NamedTuple, Protocol, TypeVar

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


class _Pin(NamedTuple):
    until: float
    client: str


class Pins(Generic[T]):
    """The pinned nodes or blocks, which are evicted after all others.

    All of them together have at most `most` pages. Beyond that, the client with the most pages
    loses the pins that it asked for least recently, so a client displaces its own pins before
    those of clients that have fewer.

    >>> pins.keep(node, seconds=300, client="key")
    >>> node in pins  # Another node is evicted if there is one.
    >>> pins.ended()  # Nodes that may be evicted like others again.
    """

    def __init__(self, most: int, clock: Clock) -> None:
        self.pages = 0
        self._most, self._clock = most, clock
        self._pins: dict[T, _Pin] = {}
        # The items of each client, by the time of the last pin, and their pages.
        self._of_client: dict[str, dict[T, None]] = {}
        self._pages: Counter[str] = Counter()
        self._first_end = math.inf  # No pin ends before.

    def __contains__(self, item: T) -> bool:
        return item in self._pins

    def __iter__(self) -> Iterator[T]:
        return iter(self._pins)

    def keep(self, item: T, seconds: float, client: str) -> None:
        """Pin for at least this time from now on.

        What several clients pin counts for the one whose pin ends last.
        """
        pin, old = _Pin(self._clock.now + seconds, client), self._pins.get(item)
        self.drop(item)
        self._add(item, pin if old is None or old.until < pin.until else old)

    def inherit(self, item: T, source: T) -> None:
        """Pin pages that were a part of `source`, as long as `source`. It has lost them already."""
        if source in self._pins:
            pin = self._pins[source]
            self._count(pin.client, -item.num_pages)
            self._add(item, pin)

    def drop(self, item: T) -> float:
        """End a pin, if there is one. Return when it would have ended."""
        pin = self._pins.pop(item, None)
        if pin is None:
            return 0.0
        self._count(pin.client, -item.num_pages)
        own = self._of_client[pin.client]
        del own[item]
        if not own:
            del self._of_client[pin.client], self._pages[pin.client]
        return pin.until

    def shrink(self, item: T, pages: int) -> None:
        """Record that `item` is about to lose so many pages."""
        if item in self._pins:
            self._count(self._pins[item].client, -pages)

    def ended(self) -> list[T]:
        """Return what is not pinned any more, least recently pinned first."""
        found: list[T] = []
        while self.pages > self._most:
            largest = max(self._pages, key=self._pages.__getitem__)
            found.append(next(iter(self._of_client[largest])))
            self.drop(found[-1])
        if self._clock.now >= self._first_end:
            over = [item for item, pin in self._pins.items() if pin.until <= self._clock.now]
            for item in over:
                self.drop(item)
            found += over
            self._first_end = min((pin.until for pin in self._pins.values()), default=math.inf)
        return found

    def _add(self, item: T, pin: _Pin) -> None:
        self._pins[item] = pin
        self._of_client.setdefault(pin.client, {})[item] = None
        self._count(pin.client, item.num_pages)
        self._first_end = min(self._first_end, pin.until)

    def _count(self, client: str, pages: int) -> None:
        self._pages[client] += pages
        self.pages += pages
