"""Tensors of a GGUF file with a vision tower.

Quantised ones stay in their blocks if the device's kernels multiply them, or else are widened when
they are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, ReaderTensor
from gguf.quants import dequantize

from ...files.gguf_reader import FastGGUFReader
from ...layers.linear import StoredTensor

_NUMBERS = {GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "F64")}


def stored_tensors(reader: FastGGUFReader) -> dict[str, StoredTensor]:
    """Return the tensors of a file by their names in the file."""
    found = {}
    for tensor in reader.tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        copy_to = partial(_copy, reader.path, tensor, shape)
        stored = StoredTensor(reader.path, tensor.name, shape, copy_to)
        if tensor.tensor_type not in _NUMBERS and len(shape) == 2:
            stored = stored._replace(kind=tensor.tensor_type.name, blocks=partial(_blocks, tensor))
        found[tensor.name] = stored
    return found


def _blocks(tensor: ReaderTensor) -> torch.Tensor:
    """Return a copy of the blocks: [rows, bytes] uint8."""
    return torch.from_numpy(np.array(tensor.data))


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

    def blocks() -> torch.Tensor:
        return torch.cat([part.blocks() for part in parts if part.blocks is not None])

    first, shape = parts[0], list(parts[0].shape)
    shape[dimension] = sum(part.shape[dimension] for part in parts)
    are_blocks = dimension == 0 and {part.kind for part in parts} == {first.kind}
    whole = first._replace(shape=tuple(shape), copy_to=copy_to, blocks=blocks)
    return whole if are_blocks and first.kind is not None else _numbers(whole)


def changed(tensor: StoredTensor, change: Callable[[torch.Tensor], torch.Tensor]) -> StoredTensor:
    """Return a tensor whose values a function makes of the stored ones."""

    def copy_to(target: torch.Tensor) -> None:
        target.copy_(change(tensor.read()))

    shape = tuple(change(torch.empty(tensor.shape, device="meta")).shape)
    return _numbers(tensor)._replace(shape=shape, copy_to=copy_to)


def constant(beside: StoredTensor, shape: tuple[int, ...], value: float) -> StoredTensor:
    """Return a tensor of the file of `beside` that has one value everywhere."""

    def copy_to(target: torch.Tensor) -> None:
        target.fill_(value)

    return _numbers(beside)._replace(shape=shape, copy_to=copy_to)


def _numbers(tensor: StoredTensor) -> StoredTensor:
    """Return a tensor that is read as numbers alone."""
    return tensor._replace(kind=None, blocks=None)
