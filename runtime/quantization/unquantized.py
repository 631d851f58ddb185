"""Weights of 16 or 32 bits, as torch has them, or packed if the device has own kernels for
bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import nn

from ...kernels.linear import LinearKernels
from ..config.quantization_registry import PLAIN
from ..layers.linear import Axis, Linear, Place, StoredMethod, weight

WIDENED = "widened "  # Prefix of the kind of the stored weight.


class Unquantized:
    """The `LinearMethod` of every weight that no other format keeps."""

    kind = PLAIN

    def __init__(self, widened_from: str | None = None) -> None:
        self.widened_from = widened_from

    def create(self, layer: Linear) -> None:
        # A head that is tied to the embedding already has a weight.
        if not hasattr(layer, "weight"):
            layer.weight = weight(layer.out_features, layer.in_features)

    def places(self, layer: Linear, part: str) -> Mapping[str, Place]:
        rows = layer.weight[layer.rows(part)]
        shapes = [tuple(rows.shape)]
        place = Place(shapes, lambda tensor: tensor.copy_to(rows), rows=Axis(0), columns=Axis(1))
        return {"weight": place}

    def finish(self, layer: Linear, kernels: LinearKernels | None) -> None:
        if kernels is not None and kernels.layout(self.kind, layer.in_features) is not None:
            layer.pack(kernels, self.kind, [layer.weight.data])

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        if layer.op is not None:
            return layer.multiply_packed(x)
        return F.linear(x, layer.weight, layer.bias)


class Widened:
    """Loads a weight by `stored`, widens it, and leaves the layer `Unquantized`.

    It is loaded into host memory, one layer at a time, because the device may lack the stored
    dtype.
    """

    def __init__(self, stored: StoredMethod) -> None:
        self.stored = stored
        self.kind = WIDENED + stored.kind
        self._waiting: list[Callable[[], None]] = []

    def create(self, layer: Linear) -> None:
        self._dtype, self._device = torch.get_default_dtype(), torch.get_default_device()
        # Host memory that is never written is not allocated by the system.
        with torch.device("meta" if self._device.type == "meta" else "cpu"):
            self.stored.create(layer)

    def places(self, layer: Linear, part: str) -> Mapping[str, Place]:
        places = dict(self.stored.places(layer, part))
        if (weight := places.get("weight")) is not None:
            places["weight"] = weight._replace(
                load=lambda tensor: self._waiting.append(lambda: weight.load(tensor))
            )
        return places

    def finish(self, layer: Linear, kernels: LinearKernels | None) -> None:
        for load in self._waiting:
            load()
        self._waiting.clear()
        values = self.stored.widen(layer).to(self._device, self._dtype)
        for name, _ in list(layer.named_parameters()):
            if name != "bias":
                delattr(layer, name)
        layer.weight = nn.Parameter(values, requires_grad=False)
        layer.method = Unquantized(self.stored.kind)
        layer.method.finish(layer, kernels)

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the layer is not finished")
