"""What the connections of a server hold together is bounded."""

from __future__ import annotations

import asyncio

from piecework.server.config.http_limits import HttpLimits
from piecework.server.http.connections import MAX_UNREAD, Connections


class Reader:
    """A connection whose client reads nothing."""

    def __init__(self, unsent: int) -> None:
        self.unsent, self.is_cut = unsent, False

    def give_way(self) -> None:
        self.is_cut = True

    def drop_body(self) -> None:
        raise AssertionError


async def test_answers_that_nobody_reads_are_bounded_together() -> None:
    connections = Connections(HttpLimits(), 100, lambda _: None)
    readers = [Reader(MAX_UNREAD // 4 + 10 * number) for number in range(4)]
    for reader in readers[:3]:
        connections.set_unread(reader, True)
    await asyncio.sleep(0)
    assert not any(reader.is_cut for reader in readers)
    connections.set_unread(readers[3], True)
    await asyncio.sleep(0)
    assert [reader.is_cut for reader in readers] == [False, False, False, True]


async def test_who_reads_on_counts_no_longer() -> None:
    connections = Connections(HttpLimits(), 100, lambda _: None)
    first, second = Reader(MAX_UNREAD), Reader(MAX_UNREAD)
    connections.set_unread(first, True)
    connections.set_unread(first, False)
    connections.set_unread(second, True)
    await asyncio.sleep(0)
    assert not first.is_cut and not second.is_cut
    third = Reader(1)
    connections.leave(second)
    connections.set_unread(third, True)
    await asyncio.sleep(0)
    assert not third.is_cut
