"""Messages over a pipe, such as the standard input and output of a helper process.

    stream.write(pack(message))                  # in either process
    message = read(stream)                       # None at the end of the stream
    head = await reader.readexactly(HEAD_BYTES)  # with asyncio
    message = unpack(head, await reader.readexactly(size(head)))

A message is the length of its content (8 bytes), the length of the name of its type (1 byte), the
name and the content.
"""

from __future__ import annotations

import struct
from typing import Any, BinaryIO

from .ipc import decode, encode

_HEAD = struct.Struct("<QB")
HEAD_BYTES = _HEAD.size


def pack(message: Any) -> bytes:
    """Return the bytes of a message, with its head."""
    name, content = encode(message)
    return b"".join((_HEAD.pack(len(content), len(name)), name, content))


def size(head: bytes) -> int:
    """Return the number of bytes that follow a head."""
    return sum(_HEAD.unpack(head))


def unpack(head: bytes, rest: bytes) -> Any:
    """Return the message of a head and the bytes that follow it. Raise `ipc.Unreadable`."""
    _, name_size = _HEAD.unpack(head)
    return decode([rest[:name_size], rest[name_size:]])


def read(stream: BinaryIO) -> Any:
    """Return the next message of a stream that blocks, or None at its end."""
    head = stream.read(HEAD_BYTES)
    if len(head) < HEAD_BYTES:
        return None
    return unpack(head, stream.read(size(head)))
