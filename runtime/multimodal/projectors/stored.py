"""Tensors of a GGUF file with a vision tower. Quantised ones are widened when they are loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from gguf import ReaderTensor
from gguf.quants import dequantize

from ...files.gguf_reader import FastGGUFReader
from ...layers.linear import StoredTensor


def stored_tensors(reader: FastGGUFReader) -> dict[str, StoredTensor]:
    """Return the tensors of a file by their names in the file."""
    found = {}
    for tensor in reader.tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        copy_to = partial(_copy, reader.path, tensor, shape)
        found[tensor.name] = StoredTensor(reader.path, tensor.name, shape, copy_to)
    return found


def _copy(path: Path, tensor: ReaderTensor, shape: tuple[int, ...], target: torch.Tensor) -> None:
    try:
        values = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        raise ValueError(
            f"{path}: the tensor {tensor.name} is stored as {tensor.tensor_type.name}, which is "
            "not supported; take a vision tower of another format"
        ) from None
    # The file is read-only, which torch does not accept.
    target.copy_(torch.from_numpy(np.require(values.reshape(shape), requirements=["W"])))


def joined(parts: Sequence[StoredTensor], dimension: int = 0) -> StoredTensor:
    """Return tensors of one shape as one tensor, side by side in a dimension that all have."""

    def copy_to(target: torch.Tensor) -> None:
        target.copy_(torch.cat([part.read() for part in parts], dimension))

    shape = list(parts[0].shape)
    shape[dimension] = sum(part.shape[dimension] for part in parts)
    return parts[0]._replace(shape=tuple(shape), copy_to=copy_to)


def changed(tensor: StoredTensor, change: Callable[[torch.Tensor], torch.Tensor]) -> StoredTensor:
    """Return a tensor whose values a function makes of the stored ones."""

    def copy_to(target: torch.Tensor) -> None:
        target.copy_(change(tensor.read()))

    shape = tuple(change(torch.empty(tensor.shape, device="meta")).shape)
    return tensor._replace(shape=shape, copy_to=copy_to)


def constant(beside: StoredTensor, shape: tuple[int, ...], value: float) -> StoredTensor:
    """Return a tensor of the file of `beside` that has one value everywhere."""

    def copy_to(target: torch.Tensor) -> None:
        target.fill_(value)

    return beside._replace(shape=shape, copy_to=copy_to)
