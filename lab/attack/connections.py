"""Attacks by connections: endless requests, slow requests, thousands of connections, unread
answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time

from .arena import BODY_BYTES, Arena, Attack, Connection, together

_MIB = 2**20
_JSON = "Content-Type: application/json"
_SLOW = 300  # Concurrent slow connections.
_HALF_BODIES = 200
_IDLE = 5000
_FLOOD_SECONDS = 8.0
_UNREAD = 20


async def _without_end(arena: Arena, beginning: bytes, block: bytes, count: int = 180) -> None:
    """Send `beginning` and then up to `count` blocks on each of four connections."""

    async def work(connection: Connection) -> None:
        if await connection.send(beginning):
            for _ in range(count):
                if not await connection.send(block):
                    break

    await arena.each(4, work)


async def _giant_header(arena: Arena) -> None:
    await _without_end(arena, arena.head() + b"X-Giant: ", b"a" * _MIB)


async def _many_headers(arena: Arena) -> None:
    await _without_end(
        arena, arena.head(), b"".join(b"X-%d: a\r\n" % number for number in range(100_000)), 20
    )


async def _giant_url(arena: Arena) -> None:
    await _without_end(arena, b"GET /health?", b"a" * _MIB)


async def _trailers(arena: Arena) -> None:
    head = arena.head("POST", "/v1/completions", _JSON, "Transfer-Encoding: chunked") + b"\r\n"
    await _without_end(arena, head + b"1\r\n \r\n0\r\nX-Trailer: ", b"a" * _MIB)
    await _without_end(arena, head + b"1;extension=", b"a" * _MIB)
    await _without_end(arena, head, b"1\r\n \r\n" * 100_000, 8)


async def _pipelining(arena: Arena) -> None:
    await _without_end(arena, b"", (arena.head("GET", "/health") + b"\r\n") * 20_000, 20)


async def _slow_headers(arena: Arena) -> None:
    await _trickle(arena, arena.head() + b"X-Slow: ")


async def _slow_bodies(arena: Arena) -> None:
    await _trickle(
        arena,
        arena.head("POST", "/v1/completions", _JSON, f"Content-Length: {BODY_BYTES}") + b"\r\n",
    )


async def _trickle(arena: Arena, beginning: bytes) -> None:
    async def work(connection: Connection) -> None:
        sent = await connection.send(beginning)
        while sent:
            await asyncio.sleep(1.0)
            sent = await connection.send(b" ")

    await arena.each(_SLOW, work)


async def _half_bodies(arena: Arena) -> None:
    head = arena.head("POST", "/v1/completions", _JSON, f"Content-Length: {BODY_BYTES}") + b"\r\n"

    async def work(connection: Connection) -> None:
        await connection.send(head + b" " * (BODY_BYTES - 1))

    await arena.each(_HALF_BODIES, work)


async def _idle_connections(arena: Arena) -> None:
    """Open connections for some seconds. Half of them send nothing, half send a part of a
    header.
    """

    async def work(connection: Connection) -> None:
        await connection.send(b"GET /hea")

    async def silent(connection: Connection) -> None:
        pass

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_FLOOD_SECONDS):
            await together([arena.each(_IDLE // 2, work), arena.each(_IDLE // 2, silent)])


async def _connection_flood(arena: Arena) -> None:
    """Open as many connections as possible. Each sends half a request and is closed."""
    end = time.monotonic() + _FLOOD_SECONDS

    async def again_and_again() -> None:
        while time.monotonic() < end:
            connection = await arena.connect()
            if connection is not None:
                await connection.send(b"GET /hea")
                connection.writer.transport.abort()
                arena.answers["left"] += 1

    await together(again_and_again() for _ in range(100))


async def _unread_answers(arena: Arena) -> None:
    """Request large answers one after another, and read nothing until the server gives up."""
    content = json.dumps({"tokens": [300] * 40_000}).encode()
    request = (
        arena.head("POST", "/v1/detokenize", _JSON, f"Content-Length: {len(content)}")
        + b"\r\n"
        + content
    )
    await together(_leave_unread(arena, request * 30) for _ in range(_UNREAD))


async def _leave_unread(arena: Arena, requests: bytes) -> None:
    loop = asyncio.get_running_loop()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        try:
            await loop.sock_connect(connection, arena.address)
            await loop.sock_sendall(connection, requests)
            # A reset is noticed here without reading.
            while connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                await asyncio.sleep(0.5)
            arena.answers["cut off"] += 1
        except OSError:
            arena.answers["cut off"] += 1
        except asyncio.CancelledError:
            arena.answers["still open"] += 1
            raise


ATTACKS = (
    Attack("giant-header", "a header of 180 MB, four times at once", _giant_header),
    Attack("many-headers", "2 million headers, four times at once", _many_headers),
    Attack("giant-url", "a URL of 180 MB, four times at once", _giant_url),
    Attack(
        "trailers", "trailers and chunk extensions of 180 MB, 800,000 chunks of a byte", _trailers
    ),
    Attack("pipelining", "400,000 requests on a connection, four times at once", _pipelining),
    Attack("slow-headers", f"{_SLOW} headers that come byte by byte", _slow_headers),
    Attack("slow-bodies", f"{_SLOW} bodies that come byte by byte", _slow_bodies),
    Attack(
        "half-bodies", f"{_HALF_BODIES} bodies of 4 MB whose last byte never comes", _half_bodies
    ),
    Attack(
        "idle-connections",
        f"{_IDLE:,} connections that say nothing or half a line",
        _idle_connections,
    ),
    Attack(
        "connection-flood",
        f"{_FLOOD_SECONDS:.0f} s of new connections, as many as can be",
        _connection_flood,
    ),
    Attack(
        "unread-answers",
        f"{_UNREAD} clients that ask for megabytes and read nothing",
        _unread_answers,
    ),
)
