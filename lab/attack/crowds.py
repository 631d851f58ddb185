"""Attacks by many requests that are complete at the same moment, or wait behind one another."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from typing import Any

from .arena import BODY_BYTES, Arena, Attack, Connection, together

_JSON = "Content-Type: application/json"
_CROWD = 256
_HISTORIES, _CALLS = 16, 24_000
_MESSAGES = 1750  # Messages of a body below 64 KiB, which is always read.
_PIPELINES, _BEHIND, _HEADER_BYTES = 300, 31, 29_000
_LEAVERS = 577
_STRINGS = 12


def request(arena: Arena, path: str, body: bytes, *lines: str) -> bytes:
    """Return a whole request. Its answer ends the connection unless `lines` say otherwise."""
    about = lines or ("Connection: close",)
    length = f"Content-Length: {len(body)}"
    return arena.head("POST", path, _JSON, length, *about) + b"\r\n" + body


async def at_once(arena: Arena, requests: Iterable[bytes]) -> None:
    """Send all requests except their last bytes, and then the last bytes together."""
    waiting, go = list(requests), asyncio.Event()
    missing = len(waiting)

    async def work(connection: Connection) -> None:
        nonlocal missing
        whole = waiting.pop()
        await connection.send(whole[:-1])
        missing -= 1
        if not missing:
            go.set()
        await go.wait()
        await connection.send(whole[-1:])

    await arena.each(missing, work)


def _body(**members: Any) -> bytes:
    return json.dumps(members, separators=(",", ":")).encode()


async def _many_messages(arena: Arena) -> None:
    messages = [{"role": "user", "content": ""}] * _MESSAGES
    body = _body(messages=messages, max_tokens=1)
    await at_once(arena, [request(arena, "/v1/chat/completions", body)] * _CROWD)


async def _many_items(arena: Arena) -> None:
    items = [{"role": "user", "content": ""}] * _MESSAGES
    body = _body(model=arena.model, input=items, max_output_tokens=1)
    await at_once(arena, [request(arena, "/v1/responses", body)] * _CROWD)


async def _long_histories(arena: Arena) -> None:
    calls = [{"function": {"name": "f"}}] * (_CALLS // 6)
    said = [{"role": "assistant", "content": "", "tool_calls": calls}] * 6
    said.append({"role": "user", "content": "Hi"})
    body = _body(messages=said, max_tokens=1)
    await at_once(arena, [request(arena, "/v1/chat/completions", body)] * _HISTORIES)


async def _unknown_strings(arena: Arena) -> None:
    """Send different strings, each of which becomes an object."""
    numbers = ",".join(f'"{number:x}"' for number in range(560_000))
    before = '{"prompt":"Hi","max_tokens":200,"ignore_eos":true,"unknown":['
    body = f"{before}{numbers[: BODY_BYTES - 200].rpartition(',')[0]}]}}".encode()
    await at_once(arena, [request(arena, "/v1/completions", body)] * _STRINGS)


async def _headers_behind(arena: Arena) -> None:
    """Let requests with large headers wait behind a running one, on every connection."""
    long = _body(prompt="Hi", max_tokens=2000, ignore_eos=True)
    running = request(arena, "/v1/completions", long, "X-A: b")
    padding = "a" * (_HEADER_BYTES // 4)
    fields = [f"X-{number}: {padding}" for number in range(4)]
    waiting = arena.head("GET", "/version", *fields) + b"\r\n"

    async def work(connection: Connection) -> None:
        await connection.send(running)
        await asyncio.sleep(1.0)
        await connection.send(waiting * _BEHIND)

    await _for_a_while(arena, work, _PIPELINES, 12.0)


async def _second_and_leave(arena: Arena) -> None:
    """Send a second request behind a long one and disconnect; then send one request."""
    long = _body(prompt="Hi", max_tokens=8000, ignore_eos=True)
    running = request(arena, "/v1/completions", long, "X-A: b")

    async def leave() -> None:
        connection = await arena.connect()
        if connection is not None:
            await connection.send(running)
            await asyncio.sleep(0.5)
            await connection.send(running)
            connection.writer.close()
            arena.answers["left"] += 1

    await together(leave() for _ in range(_LEAVERS))
    await asyncio.sleep(2.0)
    await _ask_in_time(arena)


async def _ask_in_time(arena: Arena) -> None:
    try:
        async with asyncio.timeout(20.0):
            await arena.post("/v1/completions", {"prompt": "Hi", "max_tokens": 1})
    except TimeoutError:
        arena.problems.append("a request waits behind those whose clients are gone")


async def _for_a_while(arena: Arena, work: Any, count: int, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await arena.each(count, work)
    except TimeoutError:
        pass


ATTACKS: Sequence[Attack] = (
    Attack(
        "many-messages",
        f"{_CROWD} chats of {_MESSAGES:,} messages, whole in the same moment",
        _many_messages,
    ),
    Attack(
        "many-items",
        f"{_CROWD} responses of {_MESSAGES:,} items, whole in the same moment",
        _many_items,
    ),
    Attack(
        "long-histories",
        f"{_HISTORIES} histories of {_CALLS:,} tool calls, whole in the same moment",
        _long_histories,
    ),
    Attack(
        "unknown-strings",
        f"{_STRINGS} bodies of 4 MB of short strings in an unknown member",
        _unknown_strings,
    ),
    Attack(
        "headers-behind",
        f"{_PIPELINES} connections, {_BEHIND} requests of 29 kB of headers behind a running one",
        _headers_behind,
    ),
    Attack(
        "second-and-leave",
        f"{_LEAVERS} clients that send a second request behind a long one, and leave",
        _second_and_leave,
    ),
)
