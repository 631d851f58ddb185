"""Random pictures for loads with images, as data URLs. No image library is needed."""

from __future__ import annotations

import base64
import random
import struct
import zlib

_BLOCK = 8  # Pixels of a side of a square of one colour, so that files have the size of photos.


def picture_url(size: int, rng: random.Random) -> str:
    """Return a PNG of `size` x `size` random pixels in squares of 8 x 8, as a data URL."""
    across = -(-size // _BLOCK)
    rows = []
    for _ in range(across):
        colours = rng.randbytes(3 * across)
        row = b"".join(colours[3 * at : 3 * at + 3] * _BLOCK for at in range(across))
        # Each row begins with the number of its filter.
        rows.append((b"\0" + row[: 3 * size]) * _BLOCK)
    pixels = b"".join(rows)[: (3 * size + 1) * size]
    header = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(pixels, 1)), (b"IEND", b""))
    file = b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, content) for kind, content in chunks)
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


def _chunk(kind: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)
