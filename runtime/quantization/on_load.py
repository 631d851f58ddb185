"""Weights of 16 or 32 bits that are quantised while they are loaded (`--quantization`).

A kind is "on_load NAME" with the value NAME of the flag. A finished layer has the method that
multiplies the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch

from ...kernels.linear import LinearKernels
from ...kernels.reference import quantize_dynamic
from ..layers.linear import Axis, Linear, Place, StoredTensor
from .grouped_weight import GroupedWeight, packed_nibbles
from .w8a8 import W8A8
from .weight_only import WeightOnly

# By value of `--quantization`: the width of a layer must be a multiple of this many columns.
COLUMNS = {"fp8": 1, "int8": 1, "q8_0": 32, "q4_0": 32}
_W8A8 = {
    "fp8": "w8a8 float8_e4m3fn channel token weight_scale",
    "int8": "w8a8 int8 channel token weight_scale",
}
_NUMBERS = 2**20  # Numbers that are float32 at once, few enough to stay in the CPU cache.


class OnLoad:
    """The `LinearMethod` of a layer until `finish`, which reads the numbers.

    So only one layer at a time is in memory.
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

        shape = layer.parts[part], layer.in_features
        return {"weight": Place([shape], load, rows=Axis(0), columns=Axis(1))}

    def finish(self, layer: Linear, kernels: LinearKernels | None) -> None:
        if self.target in _W8A8:
            layer.method = w8a8 = W8A8(_W8A8[self.target])
            with layer.weight.device:
                w8a8.create(layer)
            by_row = partial(quantize_dynamic, group=layer.in_features, dtype=w8a8.dtype)
            for rows, (numbers, scale) in self._quantised(layer, by_row):
                layer.weight[rows], layer.weight_scale[rows] = numbers, scale
            w8a8.finish(layer, kernels)
            return
        quantise = quantise_q8_0 if self.target == "q8_0" else quantise_q4_0
        found = [tensors for _, tensors in self._quantised(layer, quantise)]
        weight = GroupedWeight(*(torch.cat(tensors) for tensors in zip(*found, strict=True)))
        layer.method = method = WeightOnly.of([weight], 8 if self.target == "q8_0" else 4)
        method.finish(layer, kernels, [weight])

    def _quantised(
        self, layer: Linear, quantise: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
    ) -> Iterator[tuple[slice, tuple[torch.Tensor, ...]]]:
        """Yield ranges of rows with the result of `quantise`, which begins with numbers and
        scales.
        """
        for part in layer.parts:
            tensor, begin = self._parts.pop(part), layer.rows(part).start
            values = torch.empty(tensor.shape, dtype=tensor.dtype, device=layer.weight.device)
            tensor.copy_to(values)
            for chunk in torch.split(values, max(1, _NUMBERS // layer.in_features)):
                found = quantise(chunk.float())
                if not found[1].isfinite().all():
                    raise tensor.fault("holds numbers that are not finite")
                yield slice(begin, begin + len(chunk)), found
                begin += len(chunk)

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the layer is not finished")


def quantise_q8_0(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Quantise values [N, K] float32 as GGUF's Q8_0.

    Returns numbers, scales and zero points of a `GroupedWeight`. Source: quantize_row_q8_0_ref of
    ggml-org/ggml, src/ggml-quants.c.
    """
    blocks = values.view(len(values), -1, 32)
    scale = blocks.abs().amax(-1) / 127
    scaled = blocks * _reciprocal(scale)
    # Ties are rounded away from zero.
    numbers = scaled.abs().add_(0.5).floor_().copysign_(scaled).add_(128)
    return _numbers(numbers), scale.half(), torch.full_like(scale, 128, dtype=torch.uint8)


def quantise_q4_0(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Quantise as Q4_0, like `quantise_q8_0`. The number farthest from zero becomes -8."""
    blocks = values.view(len(values), -1, 32)
    farthest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)).squeeze(-1)
    scale = farthest / -8
    numbers = (blocks * _reciprocal(scale)).add_(8.5).floor_().clamp_(0, 15)
    zero = torch.full_like(scale, 8, dtype=torch.uint8)
    return packed_nibbles(_numbers(numbers)), scale.half(), zero


def _reciprocal(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale == 0, 0.0, 1 / scale).unsqueeze(-1)


def _numbers(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.flatten(1).to(torch.uint8)


def finished_kind(quantization: str) -> str:
    """Return the first words of the kind of a finished layer, by the value of `--quantization`."""
    return _W8A8.get(quantization, "weight_only")


def make_method(kind: str) -> OnLoad:
    return OnLoad(kind)
