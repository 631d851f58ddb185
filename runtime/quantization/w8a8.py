"""Weights and activations in 8 bits, INT8 or FP8.

A kind is "w8a8 DTYPE WEIGHT INPUT SCALE", such as "w8a8 int8 channel token weight_scale":

    WEIGHT   tensor, channel, or block: one scale for each part, row, or block of 128 x 128
    INPUT    static: one scale of the checkpoint; token: one for each row; group: one for
             each 128 columns of a row
    SCALE    the name of the weight's scales in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod

import torch

from ...kernels import ops
from ...kernels.linear import LinearKernels
from ...kernels.reference import widened
from ..layers.linear import Axis, Linear, Place, QuantizedInput, StoredTensor

BLOCK = 128
LARGEST_SCALE = 1e6  # With it, numbers reach 448 million in FP8. Larger scales are damaged.
_NUMBERS = 2**18  # Numbers that are checked at once, few enough to stay in the CPU cache.
# Names of weights in `LinearKernels`, by dtype and whether they have blocks.
_PACKED = {
    (torch.int8, False): "int8",
    (torch.int8, True): None,
    (torch.float8_e4m3fn, False): "fp8_e4m3",
    (torch.float8_e4m3fn, True): "fp8_e4m3_blocks",
}


class W8A8:
    """The `LinearMethod` of a layer whose activations are quantised before each product.

    Attributes:
        weight: [N, K]. A packed weight holds its scales.
        weight_scale: float32: [1], [N, 1], or [ceil(N / 128), K / 128]. It is [N, K / 128] if
            blocks would lie across parts.
        input.scale: [1] float32 if it is static. Of fused parts, the largest.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        _, dtype, self.weight, self.input, self.scale_name = kind.split()
        self.dtype: torch.dtype = getattr(torch, dtype)

    def create(self, layer: Linear) -> None:
        if self.weight == "block" and layer.in_features % BLOCK:
            raise ValueError(
                f"weights in blocks of {BLOCK} x {BLOCK} need rows of a multiple of {BLOCK} "
                f"numbers, but a layer's have {layer.in_features}; take another checkpoint"
            )
        layer.hold("weight", (layer.out_features, layer.in_features), self.dtype)
        *others, _ = layer.parts.values()
        rows = layer.out_features
        if self.weight == "block":
            if not any(part_rows % BLOCK for part_rows in others):
                rows = -(-rows // BLOCK)
            shape: tuple[int, ...] = rows, layer.in_features // BLOCK
        else:
            shape = (1,) if self.weight == "tensor" and not others else (rows, 1)
        layer.hold("weight_scale", shape, torch.float32)
        if self.input == "static":
            layer.hold("input_scale", (len(layer.parts),), torch.float32)

    def places(self, layer: Linear, part: str) -> Mapping[str, Place]:
        rows = layer.rows(part)
        count = rows.stop - rows.start
        shapes: list[tuple[int, ...]] = {
            "tensor": [(1,), (), (1, 1)],
            "channel": [(count, 1), (count,)],
            "block": [(-(-count // BLOCK), layer.in_features // BLOCK)],
        }[self.weight]
        found = {
            "weight": Place(
                [(count, layer.in_features)],
                lambda tensor: _copy_numbers(layer.weight[rows], tensor),
                (self.dtype,),
                rows=Axis(0),
                columns=Axis(1),
            ),
            self.scale_name: Place(
                shapes,
                partial(self._load_scale, layer, rows),
                rows={"tensor": None, "channel": Axis(0), "block": Axis(0, BLOCK)}[self.weight],
                columns=Axis(1, BLOCK) if self.weight == "block" else None,
            ),
        }
        if self.input == "static":
            target = layer.input_scale[list(layer.parts).index(part)]
            found["input_scale"] = Place(
                [(1,), ()], lambda tensor: _copy(target, checked_scale(tensor))
            )
        return found

    def finish(self, layer: Linear, kernels: LinearKernels | None) -> None:
        scale = None
        if self.input == "static":
            scale = layer.input_scale.amax(0, keepdim=True)
            del layer.input_scale
        group = BLOCK if self.input == "group" else layer.in_features
        layer.input = QuantizedInput(self.dtype, group, scale)
        kind = _PACKED[self.dtype, self.weight == "block"]
        if kernels is None or kind is None or kernels.layout(kind, layer.in_features) is None:
            return
        rows: torch.Tensor = layer.weight_scale
        if self.weight == "block" and rows.shape[0] != layer.out_features:
            rows = rows.repeat_interleave(BLOCK, 0)[: layer.out_features]
        elif rows.shape[0] == 1:
            rows = rows.expand(layer.out_features, 1)
        layer.pack(kernels, kind, [layer.weight], [rows.contiguous()])
        del layer.weight_scale

    def widen(self, layer: Linear) -> torch.Tensor:
        return widened(layer.weight, layer.weight_scale)

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        if layer.op is not None:
            return layer.multiply_packed(x)
        assert layer.input is not None
        numbers, scale = layer.input.quantize(x)
        return ops.scaled_linear(
            numbers, scale, layer.weight, layer.weight_scale, layer.bias, x.dtype
        )

    def _load_scale(self, layer: Linear, rows: slice, tensor: StoredTensor) -> None:
        values, target = checked_scale(tensor), layer.weight_scale
        if target.shape[0] == 1:
            _copy(target, values)
        elif self.weight != "block":
            _copy(target[rows], values.reshape(-1, 1))
        elif target.shape[0] == layer.out_features:
            by_row = values.repeat_interleave(BLOCK, 0)[: rows.stop - rows.start]
            _copy(target[rows], by_row)
        else:
            _copy(target[rows.start // BLOCK : -(-rows.stop // BLOCK)], values)


def checked_scale(tensor: StoredTensor) -> torch.Tensor:
    """Return the scales of a checkpoint as float32.

    Raises `ValueError` if a scale is not positive, or larger than any valid one.
    """
    values = (tensor.unpadded or tensor).read().float()
    wrong = ~((values > 0) & (values <= LARGEST_SCALE))
    if wrong.any():
        raise tensor.fault(
            f"has {int(wrong.sum())} of {prod(values.shape)} scales that are no positive numbers "
            f"up to {LARGEST_SCALE:g}, such as {values[wrong][0].item()}"
        )
    return values if tensor.unpadded is None else tensor.read().float()


def _copy_numbers(target: torch.Tensor, tensor: StoredTensor) -> None:
    """Copy the numbers. Raise `ValueError` if one is NaN, which no quantiser writes.

    NaN of e4m3 has all bits set except the sign.
    """
    tensor.copy_to(target)
    if target.dtype != torch.float8_e4m3fn:
        return
    for chunk in torch.split(target.view(torch.uint8).flatten(), _NUMBERS):
        if (chunk & 127).max() == 127:
            raise tensor.fault("holds NaN")


def _copy(target: torch.Tensor, values: torch.Tensor) -> None:
    target.copy_(values.reshape(target.shape) if values.numel() == target.numel() else values)


def describe(kind: str) -> str:
    """Return the name that is shown to users."""
    _, dtype, weight, inputs, *_ = kind.split()
    name = "int8" if dtype == "int8" else "fp8"
    return f"{name} by {weight}, activations by {inputs.replace('static', 'tensor (static)')}"


def make_method(kind: str) -> W8A8:
    return W8A8(kind)
