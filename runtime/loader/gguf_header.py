"""The first metadata of a GGUF file, read without the gguf library, whose import and full reading
take a start's tenths of seconds.

Format: ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_LONGEST = 2**20
"""Bytes of a key or of a text, more than any file has."""


def architecture_and_context(path: Path) -> tuple[str, int] | None:
    """What the model is and its longest context in tokens; None where the file does not say so in
    the usual place and form.
    """
    values: dict[str, Any] = {}
    try:
        with path.open("rb") as file:
            for key, value in _values(file):
                values[key] = value
                name = values.get("general.architecture")
                if isinstance(context := values.get(f"{name}.context_length"), int):
                    return str(name), context
    except (struct.error, KeyError, UnicodeDecodeError):
        pass
    return None


def _values(file: BinaryIO) -> Iterator[tuple[str, Any]]:
    """Keys and values up to the first list, behind which come the tokens."""
    magic, version, _, count = struct.unpack("<4sIQQ", file.read(24))
    if magic != b"GGUF" or version not in _VERSIONS:
        return
    for _ in range(count):
        key, kind = _text(file), _number(file, "<I")
        if kind == _ARRAY:
            return
        yield key, _text(file) if kind == _STRING else _number(file, _SCALARS[kind])


def _text(file: BinaryIO) -> str:
    length = _number(file, "<Q")
    return file.read(min(length, _LONGEST)).decode()


def _number(file: BinaryIO, form: str) -> Any:
    (value,) = struct.unpack(form, file.read(struct.calcsize(form)))
    return value
