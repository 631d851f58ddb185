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
    """Every tensor of a folder. Raises `ValueError` where a file is missing, cut off or broken, or
    holds what `read_header` refuses.
    """
    return [tensor for path in weight_files(folder) for tensor in _tensors_of(path, quantized)]


def _tensors_of(path: Path, quantized: bool) -> Iterator[StoredTensor]:
    headers = read_header(path, quantized=quantized)
    with _named_errors(path):
        # Stays open, mapped into memory, until the last of its tensors is forgotten.
        file: Any = safe_open(path, framework="pt")
    for name, header in headers.items():
        yield _stored(path, file.get_tensor, name, header, (slice(None),) * len(header.shape))


def _stored(
    path: Path,
    get_tensor: Callable[[str], Any],
    name: str,
    header: Header,
    index: tuple[slice, ...],
) -> StoredTensor:
    """The numbers of `index`, a slice a dimension."""

    def copy_to(target: torch.Tensor) -> None:
        with _named_errors(path):
            # The tensor is the mapped file: pages are read as they are copied.
            target.copy_(get_tensor(name)[index])

    shape = tuple(len(range(size)[each]) for size, each in zip(header.shape, index, strict=True))
    cut = partial(_stored, path, get_tensor, name, header)
    return StoredTensor(path, name, shape, copy_to, _DTYPES[header.dtype], cut=cut)


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is cut off or broken ({error}); fetch it again") from None
