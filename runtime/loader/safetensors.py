"""Tensors of a Hugging Face folder: one model.safetensors, or shards with an index."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..files.folder import Header, read_header, weight_files
from ..layers.linear import StoredTensor

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
}


def list_tensors(folder: Path, *, quantized: bool) -> list[StoredTensor]:
    """Return every tensor of a folder.

    Raises `ValueError` if a file is missing, cut off or damaged, or if `read_header` refuses it.
    """
    return [
        tensor for path in weight_files(folder) for tensor in tensors_of(path, quantized=quantized)
    ]


def tensors_of(path: Path, *, quantized: bool = False) -> list[StoredTensor]:
    """Return every tensor of a file. Raises the errors of `list_tensors`."""
    headers = read_header(path, quantized=quantized)
    with _named_errors(path):
        # The file stays open and mapped until its last tensor is deleted.
        file: Any = safe_open(path, framework="pt")
    return [
        _stored(path, file.get_tensor, name, header, (slice(None),) * len(header.shape))
        for name, header in headers.items()
    ]


def _stored(
    path: Path,
    get_tensor: Callable[[str], Any],
    name: str,
    header: Header,
    index: tuple[slice, ...],
) -> StoredTensor:
    """Return the part `index` of a tensor, a slice for each dimension."""

    def copy_to(target: torch.Tensor) -> None:
        with _named_errors(path):
            # The tensor is a view of the mapped file, which is read while it is copied.
            target.copy_(get_tensor(name)[index])

    shape = tuple(len(range(size)[part]) for size, part in zip(header.shape, index, strict=True))
    cut = partial(_stored, path, get_tensor, name, header)
    return StoredTensor(path, name, shape, copy_to, _DTYPES[header.dtype], cut=cut)


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is cut off or broken ({error}); download it again") from None
