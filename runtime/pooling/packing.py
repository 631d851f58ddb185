"""Packs weights of 32 bits for the device's own matrix kernels.

This serves models that run whole batches and are not traced. In traced models a pass packs the
weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ...kernels.linear import LinearKernels
from ...kernels.platform.linear_packing import LinearPacking
from ..layers.linear import Linear, Place
from ..quantization.methods import named_linears
from ..quantization.unquantized import Unquantized


class PackedNumbers(Unquantized):
    """Multiplies by the packed weight. The plain weight is freed when the layer is finished."""

    def __init__(self, platform: LinearPacking, op: torch._ops.OpOverload) -> None:
        super().__init__()
        self._platform, self._op = platform, op
        self._packed: torch.Tensor

    def places(self, layer: Linear, part: str) -> Mapping[str, Place]:
        raise AssertionError("the layer is loaded already")

    def finish(self, layer: Linear, kernels: LinearKernels | None) -> None:
        self._packed = self._platform.pack_linear_weight(layer.weight.detach())
        del layer.weight

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self._op(x, self._packed, layer.bias)
        return result


def pack_numbers(model: nn.Module, platform: LinearPacking) -> None:
    """Pack the weights of 32 bits of a loaded model, if the device has kernels for that."""
    op = platform.packed_linear()
    if op is None:
        return
    for _, linear in named_linears(model):
        if linear.op is None and linear.weight.dtype == torch.float32:
            linear.method = PackedNumbers(platform, op)
            linear.method.finish(linear, None)
