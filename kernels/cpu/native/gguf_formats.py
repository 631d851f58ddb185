"""The block formats of GGUF files, as the C++ kernels list them (`gguf/formats.h`)."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple


class BlockFormat(NamedTuple):
    layout: int  # The format's number in GGUF files, which is also the layout of packed weights.
    columns: int
    size: int  # Bytes of a block.


class _FormatInfo(ctypes.Structure):
    """`FormatInfo` of blocks.cpp."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        *((name, ctypes.c_int32) for name in ("number", "columns", "bytes")),
    ]


@cache
def gguf_formats(library: ctypes.CDLL) -> dict[str, BlockFormat]:
    """Return the formats that these kernels pack, by their names in GGUF files."""

    def listed() -> Iterator[tuple[str, BlockFormat]]:
        info, place = _FormatInfo(), 0
        while library.piecework_gguf_format(place, ctypes.byref(info)):
            yield info.name.decode(), BlockFormat(info.number, info.columns, info.bytes)
            place += 1

    return dict(listed())
