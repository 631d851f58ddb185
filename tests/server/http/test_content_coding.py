"""Compressed bodies are decoded while they come, within the limits of what they decode to."""

from __future__ import annotations

import gzip
import json
import tracemalloc
import zlib
from collections.abc import AsyncIterator

import httpx
import pytest
from http_fixtures import error_of, make_app
from scripted_engine import ScriptedEngine
from sparse import sparse

from piecework.server.http.body import MAX_BODY_BYTES
from piecework.server.http.content_coding import DECODERS

COMPLETIONS = "/v1/completions"
BODY = json.dumps({"prompt": "Hello", "max_tokens": 3}).encode()


def raw_deflate(data: bytes) -> bytes:
    made = zlib.compressobj(wbits=-15)
    return made.compress(data) + made.flush()


def zstd(data: bytes) -> bytes:
    library = pytest.importorskip("backports.zstd")
    compressed: bytes = library.compress(data)
    return compressed


CODINGS = [
    ("gzip", gzip.compress),
    ("x-gzip", gzip.compress),
    ("GZIP", gzip.compress),
    ("deflate", zlib.compress),
    ("deflate", raw_deflate),
    ("zstd", zstd),
]


def headers(coding: str) -> dict[str, str]:
    return {"Content-Type": "application/json", "Content-Encoding": coding}


@pytest.mark.parametrize(("coding", "compress"), CODINGS)
@pytest.mark.parametrize("step", [1, 7, 10_000])
async def test_a_compressed_body_means_what_it_decodes_to(
    client: httpx.AsyncClient, coding: str, compress: object, step: int
) -> None:
    assert callable(compress)
    content = compress(BODY)

    async def pieces() -> AsyncIterator[bytes]:
        for begin in range(0, len(content), step):
            yield content[begin : begin + step]

    answer = await client.post(COMPLETIONS, content=pieces(), headers=headers(coding))
    assert answer.status_code == 200, answer.text
    plain = await client.post(COMPLETIONS, content=BODY, headers=headers("identity"))
    assert answer.json()["choices"] == plain.json()["choices"]


@pytest.mark.parametrize("coding", ["compress", "gzip, gzip", "nonsense", "br"])
async def test_an_unknown_coding_is_told_which_are_known(
    client: httpx.AsyncClient, coding: str
) -> None:
    answer = await client.post(COMPLETIONS, content=BODY, headers=headers(coding))
    assert error_of(answer, 415, "Content-Encoding")["code"] == "unsupported_content_encoding"
    assert answer.headers["accept-encoding"] == ", ".join(DECODERS)


@pytest.mark.parametrize(
    "content",
    [
        BODY,
        gzip.compress(BODY)[:-1],
        gzip.compress(BODY)[:-9] + b"xxxxxxxxx",
        gzip.compress(BODY) + b"x",
        gzip.compress(BODY) * 2,
        b"\x1f",
    ],
    ids=["plain", "short", "damaged", "longer", "twice", "begun"],
)
async def test_a_body_that_is_not_in_its_coding_is_refused(
    client: httpx.AsyncClient, content: bytes
) -> None:
    answer = await client.post(COMPLETIONS, content=content, headers=headers("gzip"))
    assert error_of(answer, 400, "Content-Encoding")["code"] == "invalid_content_encoding"


async def test_no_body_needs_no_decoding(client: httpx.AsyncClient) -> None:
    assert (await client.get("/version", headers=headers("gzip"))).status_code == 200
    assert (await client.post("/flush_cache", headers=headers("gzip"))).status_code == 200


@pytest.mark.parametrize(("coding", "compress"), sparse(CODINGS, kept=[CODINGS[0], CODINGS[5]]))
async def test_little_is_decoded_of_a_body_that_becomes_too_large(
    scripted: ScriptedEngine, coding: str, compress: object
) -> None:
    assert callable(compress)
    content = compress(b" " * 2**27)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(make_app(scripted)), base_url="http://test"
    ) as client:
        tracemalloc.start()
        answer = await client.post(COMPLETIONS, content=content, headers=headers(coding))
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert str(MAX_BODY_BYTES) in error_of(answer, 413)["message"]
    assert most < 6 * MAX_BODY_BYTES


async def test_a_body_that_decodes_to_nothing_ends(client: httpx.AsyncClient) -> None:
    """deflate has empty blocks, of which any number may come."""
    sent = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(1000):
            sent += 50_000
            yield b"\x00\x00\x00\xff\xff" * 10_000

    answer = await client.post(COMPLETIONS, content=pieces(), headers=headers("deflate"))
    error_of(answer, 400, "Content-Encoding")
    assert sent < 2**20
