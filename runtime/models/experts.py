"""Experts in checkpoints: splits tensors that hold all experts of a layer into one for each expert
and projection, and skips the experts of other ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from ..layers.linear import StoredTensor, part_name
from ..layers.moe import FusedMoE


class Merged(NamedTuple):
    """The layout of a tensor [experts, rows, ...] that holds `parts`, such as ("gate_proj",
    "up_proj").

    Attributes:
        interleaved: The rows of the parts alternate. Otherwise the parts follow one another.
        transposed: The tensor is [experts, columns, rows].
        kind: The last component of the names of the results.
    """

    parts: tuple[str, ...]
    kind: str = "weight"
    transposed: bool = False
    interleaved: bool = False


# The layout that transformers uses in memory for most models.
MERGED = {"gate_up_proj": Merged(("gate_proj", "up_proj")), "down_proj": Merged(("down_proj",))}


def take_apart(tensors: Sequence[StoredTensor], merged: Mapping[str, Merged]) -> list[StoredTensor]:
    """Split tensors whose names end with "experts." and a key of `merged` into one for each expert.

    The results have names like "experts.0.up_proj". Other tensors are kept. Raises `ValueError` for
    a shape that no such tensor has.
    """
    found: list[StoredTensor] = []
    for tensor in tensors:
        prefix, is_one, key = tensor.name.rpartition("experts.")
        if not is_one or key not in merged:
            found.append(tensor)
            continue
        how = merged[key]
        dim = 2 if how.transposed else 1
        if len(tensor.shape) <= dim or tensor.shape[dim] % len(how.parts):
            raise tensor.fault(f"has shape {list(tensor.shape)}, which holds no experts")
        for expert in range(tensor.shape[0]):
            for number, part in enumerate(how.parts):
                name = f"{prefix}experts.{expert}.{part}.{how.kind}"
                found.append(_Part(tensor, name, expert, number, how).whole())
    return found


class _Part(NamedTuple):
    """Projection `number` of one expert."""

    tensor: StoredTensor
    name: str
    expert: int
    number: int
    how: Merged

    def whole(self) -> StoredTensor:
        _, *shape = self.tensor.shape
        if self.how.transposed:
            shape.reverse()
        shape[0] //= len(self.how.parts)
        return self.cut(tuple(slice(0, size) for size in shape))

    def cut(self, index: tuple[slice, ...]) -> StoredTensor:
        rows, *columns = index
        count = len(self.how.parts)
        if self.how.interleaved:
            first = self.number + rows.start * count
            rows = slice(first, first + max(rows.stop - rows.start, 0) * count, count)
        else:
            size = self.tensor.shape[2 if self.how.transposed else 1] // count
            rows = slice(self.number * size + rows.start, self.number * size + rows.stop)
        inside = [*columns, rows] if self.how.transposed else [rows, *columns]
        stored = (slice(self.expert, self.expert + 1), *inside)
        return StoredTensor(
            self.tensor.file,
            self.name,
            tuple(each.stop - each.start for each in index),
            partial(self.copy, stored),
            self.tensor.dtype,
            cut=self.cut,
        )

    def copy(self, stored: tuple[slice, ...], target: torch.Tensor) -> None:
        found = self.tensor.part(stored)
        if not self.how.transposed:
            found.copy_to(target.unsqueeze(0))
            return
        values = torch.empty(found.shape, dtype=found.dtype, device=target.device)
        found.copy_to(values)
        target.copy_(values[0].T)


def one_row(tensor: StoredTensor) -> StoredTensor:
    """Return a vector [columns] as a weight [1, columns]."""
    if len(tensor.shape) != 1:
        return tensor

    def copy_to(target: torch.Tensor) -> None:
        tensor.copy_to(target[0])

    return tensor._replace(shape=(1, *tensor.shape), copy_to=copy_to, cut=None)


def absent_experts(model: nn.Module) -> set[str]:
    """Return the checkpoint's names of the projections of experts that other ranks hold."""
    return {
        part_name(f"{prefix}.{name}", part)
        for prefix, module in model.named_modules()
        if isinstance(module, FusedMoE)
        for name in ("gate_up_proj", "down_proj")
        for part in getattr(module, name).absent
    }


def check_experts(model: nn.Module) -> None:
    """Raise `ValueError` if no kernel multiplies the finished weights of a layer."""
    for name, module in model.named_modules():
        if isinstance(module, FusedMoE):
            module.check(name)
