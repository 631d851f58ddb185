"""Attacks by images: damaged, huge and forbidden ones, in the parts of several endpoint families.

A model that reads only text refuses all of them. Serve a model of images to attack the decoders.
"""

from __future__ import annotations

import base64
import itertools
import json
import struct
import zlib
from typing import Any

from .arena import Arena, Attack, together

CHAT, MESSAGES, OLLAMA = "/v1/chat/completions", "/v1/messages", "/api/chat"
_PNG = b"\x89PNG\r\n\x1a\n"
_SIDES = (1, 2, 65, 60_000, 2**31 - 1)
_FORBIDDEN = (
    "http://169.254.169.254/latest/meta-data",
    "http://127.0.0.1:30000/health",
    "http://[::ffff:127.0.0.1]/",
    "http://2130706433/",
    "https://localhost/a.png",
    "file:///etc/passwd",
    "file:///dev/zero",
    "file://%00",
    "data:image/svg+xml;base64,PHN2Zy8+",
    "data:image/png,abc",
    "data:image/png;base64,====",
    "data:,",
    "ftp://a.example/a.png",
    "x",
)


def _chunk(kind: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)


def png(width: int, height: int, pixels: bytes = b"", *more: tuple[bytes, bytes]) -> bytes:
    """Return a PNG that says it has this size. `pixels` are its rows before compression."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), *more, (b"IDAT", zlib.compress(pixels)), (b"IEND", b""))
    return _PNG + b"".join(_chunk(kind, content) for kind, content in chunks)


def parts(content: bytes) -> list[tuple[str, dict[str, Any]]]:
    """Return requests of several families with this file."""
    text = base64.b64encode(content).decode()
    url = f"data:image/png;base64,{text}"
    source = {"type": "base64", "media_type": "image/png", "data": text}
    image = {"type": "image_url", "image_url": {"url": url}}
    return [
        (CHAT, {"messages": [{"role": "user", "content": [image]}], "max_tokens": 1}),
        (
            MESSAGES,
            {
                "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}],
                "max_tokens": 1,
            },
        ),
        (
            OLLAMA,
            {
                "model": "default",
                "stream": False,
                "messages": [{"role": "user", "content": "x", "images": [text]}],
                "options": {"num_predict": 1},
            },
        ),
    ]


async def _files(arena: Arena) -> None:
    whole = png(64, 64, (b"\0" + bytes(192)) * 64)
    texts = zlib.compress(bytes(50 * 2**20))
    files = [
        *(png(width, height) for width, height in itertools.product(_SIDES, repeat=2)),
        *(whole[:size] for size in range(0, len(whole), 7)),
        png(64, 64, bytes(50 * 2**20)),  # More rows than the size says.
        png(64, 64, b"", (b"zTXt", b"a\0\0" + texts), (b"iCCP", b"a\0\0" + texts)),
        b"GIF89a" + struct.pack("<HHBBB", 65_535, 65_535, 0xF7, 0, 0) + bytes(1000),
        b"\xff\xd8\xff\xe0" + b"\xff\xd8" * 10_000,
        b"RIFF" + struct.pack("<I", 2**32 - 1) + b"WEBPVP8L" + bytes(1000),
        bytes(2**20),
    ]
    for file in files:
        await together(arena.post(path, body) for path, body in parts(file))


async def _addresses(arena: Arena) -> None:
    for url in _FORBIDDEN:
        image = {"type": "image_url", "image_url": {"url": url}}
        body = {"messages": [{"role": "user", "content": [image]}], "max_tokens": 1}
        await arena.post(CHAT, body)


async def _large(arena: Arena) -> None:
    url = "data:image/png;base64," + base64.b64encode(_PNG + bytes(17 * 2**20)).decode()
    image = {"type": "image_url", "image_url": {"url": url}}
    body = json.dumps({"messages": [{"role": "user", "content": [image]}]}).encode()
    await together(arena.post(CHAT, body) for _ in range(6))


ATTACKS = (
    Attack("image-files", "images that are cut, huge or bombs, for three families", _files),
    Attack("image-addresses", "images at addresses that must not be reached", _addresses),
    Attack("image-bytes", "six bodies of 24 MB with an image", _large),
)
