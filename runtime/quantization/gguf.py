"""Blocks of a GGUF file, whose 2 to 8 bits are packed for the device's own kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter

import torch
from torch import nn

from ...kernels.linear import LinearKernels
from ..layers.linear import Axis, Linear, Place, StoredTensor

_MIXED = "gguf "
NVFP4 = "NVFP4"  # The format whose tensors have a scale of their own.


def kind_of(formats: Sequence[str]) -> str:
    """Return the kind of a layer whose parts have these formats: "Q4_K", or "gguf Q4_K Q4_K
    Q6_K".
    """
    return formats[0] if len(set(formats)) == 1 else _MIXED + " ".join(formats)


def packed_kind(kind: str, rows: Sequence[int]) -> str:
    """Return the name by which `LinearKernels` know a weight of this kind. `rows` are those of its
    parts.
    """
    if not kind.startswith(_MIXED):
        return kind
    parts = groupby(zip(kind.split()[1:], rows, strict=True), key=itemgetter(0))
    return "mixed " + " ".join(f"{name} {sum(rows for _, rows in run)}" for name, run in parts)


class GGUFBlocks:
    """The `LinearMethod` of one layer. See `kind_of`."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._parts: dict[int, StoredTensor] = {}

    def create(self, layer: Linear) -> None:
        # `finish` sets the packed weight.
        layer.weight = nn.Parameter(torch.empty(0, dtype=torch.uint8), requires_grad=False)

    def places(self, layer: Linear, part: str) -> Mapping[str, Place]:
        rows = layer.rows(part)

        def load(tensor: StoredTensor) -> None:
            # `finish` reads the blocks, so that those of one layer at a time are in memory twice.
            self._parts[rows.start] = tensor

        shape = rows.stop - rows.start, layer.in_features
        return {"weight": Place([shape], load, rows=Axis(0), columns=Axis(1))}

    def finish(self, layer: Linear, kernels: LinearKernels | None) -> None:
        assert kernels is not None
        parts = [tensor for _, tensor in sorted(self._parts.items())]
        blocks = [tensor.blocks() for tensor in parts if tensor.blocks]
        factors = [
            torch.full((len(part), 1), tensor.factor)
            for part, tensor in zip(blocks, parts, strict=True)
            if NVFP4 in self.kind
        ]
        layer.pack(kernels, packed_kind(self.kind, list(layer.parts.values())), blocks, factors)
        self._parts.clear()

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        return layer.multiply_packed(x)


def describe(kind: str) -> str:
    """Return the name that is shown to users."""
    return " and ".join(dict.fromkeys(kind.split()[1:]))


def make_method(kind: str) -> GGUFBlocks:
    return GGUFBlocks(kind)
