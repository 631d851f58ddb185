"""The open connections of a server together: how many there are, which of them may give way, and
what they hold.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol

from ..config.http_limits import HttpLimits
from ..core.open_paths import HEALTH_PATHS

RESERVE = 32
"""Connections beyond `--max-connections`, for monitoring: one that asks for anything else is
answered 503.
"""
_MIB = 2**20
MAX_UNREAD = 128 * _MIB
"""Bytes of answers that may wait for all clients together."""


class Connection(Protocol):
    """A connection as the others see it."""

    @property
    def unsent(self) -> int:
        """Bytes of answers that its client has not read."""
        ...

    def give_way(self) -> None:
        """Close at once: it waits for a request, and others have one."""

    def drop_body(self) -> None:
        """Give up the body that is arriving, and what has arrived of it."""


class Connections:
    """What the connections of one server hold together.

    A connection waits where no request of it is under way: it is idle, or has not sent all headers.
    `most`: connections that may be open, those for monitoring not counted. `count_error`: called
    with the type of each error that is answered.
    """

    def __init__(self, limits: HttpLimits, most: int, count_error: Callable[[str], None]) -> None:
        self.limits = limits
        self.count_error = count_error
        self._most = most
        self._open: set[Connection] = set()
        self._waiting: dict[Connection, None] = {}
        self._unread: set[Connection] = set()
        self._bodies: dict[Connection, int] = {}
        self._body_bytes = 0

    @property
    def crowded(self) -> bool:
        """As many requests as there may be are under way: one more is answered only where it is for
        monitoring.
        """
        return len(self._open) - len(self._waiting) >= self._most

    def enter(self, connection: Connection) -> bool:
        """Count a new connection, which waits. False where there is no room, and nobody who could
        give way.
        """
        if len(self._open) >= self._most + RESERVE:
            oldest = next((other for other in self._waiting if not other.unsent), None)
            if oldest is None:
                return False
            self.leave(oldest)
            oldest.give_way()
        self._open.add(connection)
        self._waiting[connection] = None
        return True

    def leave(self, connection: Connection) -> None:
        """The connection is closed, or as good as closed. Leaving twice does nothing."""
        self._open.discard(connection)
        self._waiting.pop(connection, None)
        self._unread.discard(connection)
        self.release(connection)

    def set_unread(self, connection: Connection, unread: bool) -> None:
        """Its client reads more slowly than answers come. Where all that waits for clients is too
        much, those for whom most waits are cut off.
        """
        self._unread.discard(connection)
        if not unread:
            return
        self._unread.add(connection)
        total = sum(each.unsent for each in self._unread)
        while total > MAX_UNREAD:
            largest = max(self._unread, key=lambda each: each.unsent)
            total -= largest.unsent
            self._unread.discard(largest)
            # It may be the one that is writing just now.
            asyncio.get_running_loop().call_soon(largest.give_way)

    def set_waiting(self, connection: Connection, waiting: bool) -> None:
        if not waiting:
            self._waiting.pop(connection, None)
        elif connection in self._open:
            self._waiting.setdefault(connection)

    def hold(self, connection: Connection, size: int) -> None:
        """`size` more bytes of an unfinished body have come; where all are too much, the oldest is
        dropped.
        """
        self._bodies[connection] = self._bodies.get(connection, 0) + size
        self._body_bytes += size
        while self._body_bytes > self.limits.max_unfinished_bodies * _MIB:
            oldest = next(iter(self._bodies))
            self.release(oldest)
            oldest.drop_body()

    def give_back(self, connection: Connection, size: int) -> None:
        """So many bytes of its unfinished body are elsewhere."""
        if connection in self._bodies:
            self._bodies[connection] -= size
            self._body_bytes -= size

    def release(self, connection: Connection) -> None:
        """The connection's body is whole, or gone."""
        self._body_bytes -= self._bodies.pop(connection, 0)


def is_monitoring(method: bytes, url: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether a request is one that the reserve is for, and has no body that could keep it."""
    has_body = any(
        name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
        for name, value in headers
    )
    path = url.partition(b"?")[0].decode("latin-1")
    return method in (b"GET", b"HEAD") and path in HEALTH_PATHS and not has_body
