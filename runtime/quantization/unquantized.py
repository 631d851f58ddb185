"""Weights of 16 or 32 bits: as torch has them, or packed where the device has kernels of its own
for bfloat16.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ...kernels.linear import LinearKernels
from ..layers.linear import Linear, StoredTensor, weight


class Unquantized:
    """The `LinearMethod` of every weight that no other format keeps, whatever it is stored as."""

    kind = "bfloat16"

    def create(self, layer: Linear) -> None:
        # A head that is tied to the embedding has its weight already.
        if not hasattr(layer, "weight"):
            layer.weight = weight(layer.out_features, layer.in_features)

    def load(self, layer: Linear, part: str, tensor: StoredTensor) -> None:
        tensor.copy_to(layer.weight[layer.rows(part)])

    def finish(self, layer: Linear, kernels: LinearKernels | None) -> None:
        if kernels is not None and kernels.layout(self.kind, layer.in_features) is not None:
            layer.pack(kernels, self.kind, [layer.weight.data])

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        if layer.op is not None:
            return layer.multiply_packed(x)
        return F.linear(x, layer.weight, layer.bias)
