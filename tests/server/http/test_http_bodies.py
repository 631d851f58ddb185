"""Bodies that are no JSON, of another type, or too large are answered in OpenAI's error shape."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import httpx
import pytest
from http_fixtures import error_of

from piecework.server.http.body import MAX_BODY_BYTES

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    "raw",
    [
        b"{", b"nonsense", b'{"prompt": "x"', b'{"prompt": "x",}', b"{'prompt': 'x'}",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "\\ud800"}', b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}', b"[" * 50_000,
        b'{"a":' * 20_000, b'{"prompt": "x", "seed": ' + b"9" * 10_000 + b"}",
        b"\x00", b'{"prompt": "x"} trailing', b"",
    ],
    ids=lambda raw: repr(raw[:30]),
)  # fmt: skip
@pytest.mark.parametrize("path", [COMPLETIONS, GENERATE])
async def test_a_body_that_is_not_json(client: httpx.AsyncClient, path: str, raw: bytes) -> None:
    assert (
        error_of(await client.post(path, content=raw, headers=JSON), 400)["code"] == "invalid_json"
    )


@pytest.mark.parametrize("raw", [b"[]", b'"x"', b"5", b"null", b"true"])
async def test_a_body_that_is_no_object(client: httpx.AsyncClient, raw: bytes) -> None:
    error_of(await client.post(COMPLETIONS, content=raw, headers=JSON), 400)


@pytest.mark.parametrize("number", [b"1e999", b"-1e999"])
async def test_a_number_beyond_floats(client: httpx.AsyncClient, number: bytes) -> None:
    error_of(
        await client.post(
            COMPLETIONS, content=b'{"prompt": "x", "temperature": ' + number + b"}", headers=JSON
        ),
        400,
        "temperature",
    )


@pytest.mark.parametrize(
    "kind",
    [
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "json",
        "",
        "\xff",
    ],
)
async def test_another_content_type(client: httpx.AsyncClient, kind: str) -> None:
    response = await client.post(
        COMPLETIONS, content=b'{"prompt": "x"}', headers={"Content-Type": kind.encode("latin-1")}
    )
    assert "application/json" in error_of(response, 415, "Content-Type")["message"]


@pytest.mark.parametrize(
    "kind", ["application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"]
)
async def test_each_name_of_json_is_taken(client: httpx.AsyncClient, kind: str) -> None:
    assert (
        await client.post(COMPLETIONS, content=b'{"prompt": "x"}', headers={"Content-Type": kind})
    ).status_code == 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, GENERATE, "/v1/tokenize", "/abort_request"])
async def test_a_body_that_is_too_large(client: httpx.AsyncClient, path: str) -> None:
    body = json.dumps({"prompt": "x" * 10_000_000}).encode()
    assert (
        str(MAX_BODY_BYTES)
        in error_of(await client.post(path, content=body, headers=JSON), 413)["message"]
    )


@pytest.mark.parametrize("announced", [False, True])
async def test_little_is_read_of_a_large_body(client: httpx.AsyncClient, announced: bool) -> None:
    sent = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(1000):
            sent += 65_536
            yield b" " * 65_536

    length = {"Content-Length": str(1000 * 65_536)} if announced else {}
    error_of(await client.post(COMPLETIONS, content=pieces(), headers=JSON | length), 413)
    assert sent <= (0 if announced else MAX_BODY_BYTES + 2 * 65_536)


async def test_a_body_just_within_the_limit_is_read(client: httpx.AsyncClient) -> None:
    body = b'{"prompt": "Hello"}'.ljust(MAX_BODY_BYTES)
    assert (await client.post(COMPLETIONS, content=body, headers=JSON)).status_code == 200
    assert (await client.post(COMPLETIONS, content=body + b" ", headers=JSON)).status_code == 413
