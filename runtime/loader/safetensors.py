"""Tensors of a Hugging Face folder: one model.safetensors, or shards with an index."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..layers.linear import StoredTensor
from .files import read_header, weight_files


def list_tensors(folder: Path) -> list[StoredTensor]:
    """Every tensor of a folder. Raises `ValueError` where a file is missing, cut off or broken, or
    holds other than numbers.
    """
    return [tensor for path in weight_files(folder) for tensor in _tensors_of(path)]


def _tensors_of(path: Path) -> Iterator[StoredTensor]:
    headers = read_header(path)
    with _named_errors(path):
        # Stays open, mapped into memory, until the last of its tensors is forgotten.
        file: Any = safe_open(path, framework="pt")
    for name, header in headers.items():
        yield StoredTensor(path, name, header.shape, partial(_copy, path, file.get_tensor, name))


def _copy(path: Path, get_tensor: Callable[[str], Any], name: str, target: torch.Tensor) -> None:
    with _named_errors(path):
        target.copy_(get_tensor(name))


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is cut off or broken ({error}); fetch it again") from None
