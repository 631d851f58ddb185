"""Weights of 16 or 32 bits that are quantised while they are loaded (`--quantization`).

A kind is "on_load NAME", the name being the flag's. A finished layer has the method that multiplies
what came of it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...kernels.linear import LinearKernels
from ...kernels.reference import quantize_dynamic
from ..layers.linear import Linear, Place, StoredTensor
from .w8a8 import W8A8

W8A8_KINDS = {
    "int8": "w8a8 int8 channel token weight_scale",
    "fp8": "w8a8 float8_e4m3fn channel token weight_scale",
}
GROUPS = {"int8": 1, "fp8": 1}
"""Of how many numbers a layer's width must be a multiple."""
_ROWS = 4096
"""That are float32 at once."""


class OnLoad:
    """The `LinearMethod` of a layer until its numbers are read, in `finish`: so that those of one
    layer at a time lie in memory.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.target = kind.partition(" ")[2]
        self._parts: dict[str, StoredTensor] = {}

    def create(self, layer: Linear) -> None:
        layer.hold("weight", (0,), torch.uint8)

    def places(self, layer: Linear, part: str) -> Mapping[str, Place]:
        def load(tensor: StoredTensor) -> None:
            self._parts[part] = tensor

        return {"weight": Place([(layer.parts[part], layer.in_features)], load)}

    def finish(self, layer: Linear, kernels: LinearKernels | None) -> None:
        method = W8A8(W8A8_KINDS[self.target])
        device = layer.weight.device
        with device:
            method.create(layer)
        for part in layer.parts:
            tensor, rows = self._parts.pop(part), layer.rows(part)
            values = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            tensor.copy_to(values)
            for begin in range(0, values.shape[0], _ROWS):
                some = slice(rows.start + begin, min(rows.start + begin + _ROWS, rows.stop))
                numbers, scale = quantize_dynamic(
                    values[begin : begin + _ROWS], layer.in_features, method.dtype
                )
                if not scale.isfinite().all():
                    raise tensor.fault("holds numbers that are not finite")
                layer.weight[some], layer.weight_scale[some] = numbers, scale
        layer.method = method
        method.finish(layer, kernels)

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the layer is not finished")


def make_method(kind: str) -> OnLoad:
    return OnLoad(kind)
