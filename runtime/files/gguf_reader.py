"""Opens GGUF files by the gguf library's reader, with a faster way to read arrays of metadata."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from gguf import GGUFEndian, GGUFReader, GGUFValueType

from .folder import check_pointer

# The result of `GGUFReader._get_field_parts`: the number of bytes, the parts of the file, the
# indices of the parts that are data, the types.
_FieldParts = tuple[int, list[Any], list[int], list[Any]]


class FastGGUFReader(GGUFReader):  # type: ignore[misc]
    """A `GGUFReader` that reads arrays of metadata at once.

    The library wraps every element of an array in a chain of memory-mapped views, which takes 2.4 s
    for a vocabulary of 49,152 tokens and its merges. This class takes 0.1 s for the same result
    (`ReaderField.parts` and `data`).
    """

    @property
    def path(self) -> Path:
        return Path(self.data.filename)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> _FieldParts:
        if raw_type != GGUFValueType.ARRAY:
            return cast(_FieldParts, super()._get_field_parts(orig_offs, raw_type))
        content: npt.NDArray[np.uint8] = np.asarray(self.data)
        order = "<" if self.endianess == GGUFEndian.LITTLE else ">"
        item_type, length = struct.unpack_from(f"{order}IQ", content.data, orig_offs)
        begin = orig_offs + 12
        parts: list[Any] = [content[orig_offs : orig_offs + 4], content[orig_offs + 4 : begin]]
        types = [GGUFValueType.ARRAY, GGUFValueType(item_type)] if length else [GGUFValueType.ARRAY]
        if item_type == GGUFValueType.STRING:
            end = _split_strings(content, begin, length, f"{order}Q", parts)
            data = list(range(3, 3 + 2 * length, 2))
        elif (scalar := self.gguf_scalar_to_np.get(GGUFValueType(item_type))) is not None:
            dtype = np.dtype(scalar).newbyteorder(order)
            end = begin + length * dtype.itemsize
            values = np.frombuffer(content, dtype, length, begin)
            parts += [values[index : index + 1] for index in range(length)]
            data = list(range(2, 2 + length))
        else:
            return cast(_FieldParts, super()._get_field_parts(orig_offs, raw_type))
        return end - orig_offs, parts, data, types


def _split_strings(
    content: npt.NDArray[np.uint8], begin: int, count: int, length_format: str, parts: list[Any]
) -> int:
    """Append the length and the bytes of each string to `parts`. Return the end of the last one."""
    unpack, view = struct.Struct(length_format).unpack_from, content.data
    for _ in range(count):
        (length,) = unpack(view, begin)
        end = begin + 8 + length
        parts += content[begin : begin + 8], content[begin + 8 : end]
        begin = end
    if begin > len(content):
        raise ValueError("the file ends within its metadata")
    return begin


def open_gguf(path: Path) -> FastGGUFReader:
    """Open a GGUF file. Raise `ValueError` if it cannot be opened or is not a whole GGUF file."""
    try:
        return FastGGUFReader(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be opened: {error}") from error
    except (
        ValueError,
        IndexError,
        KeyError,
        struct.error,
        OverflowError,
        RecursionError,
        UnicodeDecodeError,
    ) as error:
        check_pointer(path)
        raise ValueError(f"{path} is not a whole GGUF file ({error}); download it again") from error


def metadata(reader: FastGGUFReader, key: str, default: Any = None) -> Any:
    """Return a metadata value (number, text or list), or `default` if the key is missing."""
    field = reader.get_field(key)
    return default if field is None else field.contents()
