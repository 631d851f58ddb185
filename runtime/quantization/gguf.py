"""Blocks of a GGUF file: the 4 or 8 bits that they hold, packed for the device's own kernels."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ...kernels.linear import LinearKernels
from ..layers.linear import Axis, Linear, Place, StoredTensor


class GGUFBlocks:
    """The `LinearMethod` of one layer whose parts are all stored as `kind`, such as "Q4_1"."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._parts: dict[int, StoredTensor] = {}

    def create(self, layer: Linear) -> None:
        # The packed weight comes whole, in `finish`.
        layer.weight = nn.Parameter(torch.empty(0, dtype=torch.uint8), requires_grad=False)

    def places(self, layer: Linear, part: str) -> Mapping[str, Place]:
        rows = layer.rows(part)

        def load(tensor: StoredTensor) -> None:
            # Read by `finish` only, so that one layer's blocks at a time are in memory twice.
            self._parts[rows.start] = tensor

        shape = rows.stop - rows.start, layer.in_features
        return {"weight": Place([shape], load, rows=Axis(0), columns=Axis(1))}

    def finish(self, layer: Linear, kernels: LinearKernels | None) -> None:
        assert kernels is not None
        blocks = [tensor.blocks() for _, tensor in sorted(self._parts.items()) if tensor.blocks]
        layer.pack(kernels, self.kind, blocks)
        self._parts.clear()

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        return layer.multiply_packed(x)
