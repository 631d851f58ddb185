"""Attacks by answers: expensive answers, large answers to small requests, unread answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterable
from typing import Any

from .arena import BODY_BYTES, Arena, Attack, together
from .crowds import request

_LONGEST_TOKENS = 690_000
_UNREAD = 12
_ALTERNATIVES = 100
_SAMPLES = 128


async def _description(arena: Arena) -> None:
    """Request the description of the API several times at once. The first requests make it."""
    await together(arena.ask("GET", path) for path in ("/openapi.json", "/docs") for _ in range(8))


async def _charsets(arena: Arena) -> None:
    """Send forms whose texts need slow decoders, or decoders that return no text."""
    await together(
        [
            *[_form(arena, "punycode", b"file", b"a" * 400_000) for _ in range(4)],
            *[_form(arena, charset, name, b"batch") for charset, name in _ODD_NAMES],
        ]
    )


_ODD_NAMES = (
    ("unicode-escape", b"\\ud800"),
    ("raw-unicode-escape", b"\\udfff"),
    ("utf-7", b"+2AA-"),
    ("utf-16-le", b"\x00\xd8"),
    ("idna", b"a" * 60),
)


async def _form(arena: Arena, charset: str, name: bytes, purpose: bytes) -> None:
    parts = (
        b'--X\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n%b\r\n--X\r\n'
        b'Content-Disposition: form-data; name="file"; filename="%b"\r\n\r\n{}\r\n--X--\r\n'
    ) % (purpose, name)
    assert arena.session is not None
    headers = {"Content-Type": f"multipart/form-data; boundary=X; charset={charset}"}
    async with arena.session.post(
        f"{arena.base_url}/v1/files", data=parts, headers=headers
    ) as answer:
        content = await answer.read()
    arena.answers[str(answer.status)] += 1
    if answer.status >= 500:
        arena.problems.append(f"{answer.status} to a form in {charset}: {content[:200]!r}")


async def _long_texts(arena: Arena) -> None:
    """Send ids of the longest token to detokenise, and do not read the texts."""
    token = await _longest_token(arena)
    count = min(_LONGEST_TOKENS, (BODY_BYTES - 20) // (len(str(token)) + 1))
    body = b'{"tokens":[' + b",".join([str(token).encode()] * count) + b"]}"
    await _unread(arena, [request(arena, "/v1/detokenize", body, "X-A: b")] * _UNREAD)


async def _longest_token(arena: Arena) -> int:
    ids = list(range(40_000))
    status, content = await arena.post("/v1/detokenize", {"tokens": [[id] for id in ids[:4000]]})
    texts = json.loads(content)["text"] if status == "200" else [""]
    return max(range(len(texts)), key=lambda at: len(texts[at]))


async def _many_alternatives(arena: Arena) -> None:
    """Request megabytes of log-probabilities in bodies of a hundred bytes, and do not read them.

    Some requests exceed the limit of an answer, and some are exactly at it.
    """
    bodies = [
        {"prompt": "Hi", "max_tokens": tokens, "n": _SAMPLES, "ignore_eos": True}
        for tokens in (64, 40, 40, 40, 40)
    ]
    await _unread(
        arena,
        [
            request(
                arena,
                "/v1/completions",
                json.dumps({**body, "logprobs": _ALTERNATIVES}).encode(),
                "X-A: b",
            )
            for body in bodies
        ],
    )


async def _counted_again(arena: Arena) -> None:
    """Request streams of many samples that report their usage in every chunk."""
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "n": 64,
        "max_tokens": 400,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    await arena.post("/v1/chat/completions", body)


async def _unread(arena: Arena, requests: Iterable[bytes]) -> None:
    """Send a request and read nothing."""
    await together(_leave_unread(arena, each) for each in requests)


async def _leave_unread(arena: Arena, content: bytes) -> None:
    loop = asyncio.get_running_loop()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            await loop.sock_connect(connection, arena.address)
            await loop.sock_sendall(connection, content)
            for _ in range(60):
                await asyncio.sleep(0.5)
                if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    break
        arena.answers["unread"] += 1


ATTACKS: Any = (
    Attack("description", "the description of the API, asked for 16 times at once", _description),
    Attack("charsets", "forms in charsets whose decoders are slow or give no text", _charsets),
    Attack(
        "long-texts",
        f"{_UNREAD} times {_LONGEST_TOKENS:,} ids of a long token to detokenise, not read",
        _long_texts,
    ),
    Attack(
        "many-alternatives",
        f"{_SAMPLES} samples with {_ALTERNATIVES} alternatives a token, five times, not read",
        _many_alternatives,
    ),
    Attack("counted-again", "64 streamed samples that tell their usage each time", _counted_again),
)
