"""The open connections of a server: their number, which may be closed, and their memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol

from ..config.http_limits import HttpLimits
from ..core.open_paths import HEALTH_PATHS

# Connections beyond `--max-connections` for monitoring. Other requests on them are answered 503.
RESERVE = 32
_MIB = 2**20
MAX_UNREAD = 128 * _MIB  # Maximum bytes of unread answers of all clients together.


class Connection(Protocol):
    """The interface of a connection for `Connections`."""

    @property
    def unsent(self) -> int:
        """Return the bytes of answers that the client has not read."""
        ...

    def give_way(self) -> None:
        """Close at once to make room for another connection."""

    def drop_body(self) -> None:
        """Refuse the body that is arriving and free its bytes."""


class Connections:
    """The connections of one server.

    A connection is waiting if it has no request: it is idle or has not sent all headers. `most` is
    the maximum number of connections without those for monitoring. `count_error` is called with the
    type of each error that is answered.
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
        """Whether the maximum number of requests runs, so that only monitoring is answered."""
        return len(self._open) - len(self._waiting) >= self._most

    def enter(self, connection: Connection) -> bool:
        """Count a new, waiting connection. Return False if there is no room for it.

        If the server is full, the longest waiting connection is closed.
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
        """Remove a connection that is closed or closing. A second call does nothing."""
        self._open.discard(connection)
        self._waiting.pop(connection, None)
        self._unread.discard(connection)
        self.release(connection)

    def set_unread(self, connection: Connection, unread: bool) -> None:
        """Set whether a client reads more slowly than its answers are written.

        If the unread bytes of all clients exceed `MAX_UNREAD`, the largest ones are disconnected.
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
            # Call it later, because it may be the connection that is writing now.
            asyncio.get_running_loop().call_soon(largest.give_way)

    def set_waiting(self, connection: Connection, waiting: bool) -> None:
        if not waiting:
            self._waiting.pop(connection, None)
        elif connection in self._open:
            self._waiting.setdefault(connection)

    def hold(self, connection: Connection, size: int) -> None:
        """Count `size` more bytes of an unfinished body. Above the limit, drop the oldest body."""
        self._bodies[connection] = self._bodies.get(connection, 0) + size
        self._body_bytes += size
        while self._body_bytes > self.limits.max_unfinished_bodies * _MIB:
            oldest = next(iter(self._bodies))
            self.release(oldest)
            oldest.drop_body()

    def give_back(self, connection: Connection, size: int) -> None:
        """Subtract `size` bytes of an unfinished body, which are not held any more."""
        if connection in self._bodies:
            self._bodies[connection] -= size
            self._body_bytes -= size

    def release(self, connection: Connection) -> None:
        """Forget the body of a connection, which is complete or dropped."""
        self._body_bytes -= self._bodies.pop(connection, 0)


def is_monitoring(method: bytes, url: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return whether a request is for monitoring and has no body."""
    has_body = any(
        name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
        for name, value in headers
    )
    path = url.partition(b"?")[0].decode("latin-1")
    return method in (b"GET", b"HEAD") and path in HEALTH_PATHS and not has_body
