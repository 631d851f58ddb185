"""NVFP4: numbers of 4 bits (e2m1), an e4m3 scale for each 16 columns, and a float32 scale for the
tensor.

A value is number * scale * tensor scale. Activations stay in 16 bits, which is more exact, unless
the checkpoint quantises them and the device multiplies 4 bits by 4 bits (`ByFP4`).

Sources of the layouts: compressed-tensors' compressors/nvfp4, and ModelOpt's
torch/quantization/qtensor/nvfp4_tensor.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...kernels import ops
from ...kernels.fp4 import E4M3, in_tiles, tiled_shape
from ...kernels.linear import LinearKernels
from ..layers.linear import NUMBERS, Axis, Linear, Place, StoredTensor
from .grouped_weight import regrouped
from .w8a8 import LARGEST_SCALE

FORMAT = "nvfp4-pack-quantized"
GROUP = 16
FP4 = " fp4"  # In a kind: activations have 4 bits.
_BY_ROWS = " rows"
# What products of 4 bits by 4 bits need: rows and columns of a multiple of these numbers.
_FP4_ROWS, _FP4_COLUMNS = 32, 64
# The kinds of packed weights, of which a device has one, and the columns of their blocks.
_STORED = {"nvfp4": GROUP, "NVFP4": 64}
_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# By the writer: the names of the numbers, of the tensor's scale and of the activations' scale.
# compressed-tensors stores the reciprocal of the tensor's scale.
_NAMES = {
    "compressed": ("weight_packed", "weight_global_scale", "input_global_scale"),
    "modelopt": ("weight", "weight_scale_2", "input_scale"),
}


class NVFP4:
    """The `LinearMethod` of a kind "nvfp4 WRITER", with a WRITER of `_NAMES`.

    Parts have numbers [rows, columns / 2] uint8, the earlier column in the low half, scales [rows,
    columns / 16] e4m3, and one scale of the tensor.
    """

    keeps_inputs = False  # Whether the scale of activations is read.

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._writer = kind.split()[1]
        self._parts: defaultdict[str, dict[str, StoredTensor]] = defaultdict(dict)

    def create(self, layer: Linear) -> None:
        if layer.in_features % GROUP:
            raise ValueError(
                f"NVFP4 weights need rows of a multiple of {GROUP} numbers, but a layer's have "
                f"{layer.in_features}; take another checkpoint"
            )
        layer.hold("weight", (0,), torch.uint8)

    def places(self, layer: Linear, part: str) -> Mapping[str, Place]:
        rows, columns = layer.parts[part], layer.in_features
        numbers, whole, inputs = _NAMES[self._writer]

        def keep(name: str) -> Callable[[StoredTensor], None]:
            def load(tensor: StoredTensor) -> None:
                self._parts[part][name] = tensor

            return load

        return {
            numbers: Place(
                [(rows, columns // 2)],
                keep("numbers"),
                (torch.uint8,),
                rows=Axis(0),
                columns=Axis(1, 2),
            ),
            "weight_scale": Place(
                [(rows, columns // GROUP)],
                keep("scales"),
                (E4M3,),
                rows=Axis(0),
                columns=Axis(1, GROUP),
            ),
            whole: Place([(1,), ()], keep("whole"), NUMBERS),
            inputs: Place([(1,), ()], keep("inputs"), NUMBERS, is_optional=not self.keeps_inputs),
        }

    def finish(self, layer: Linear, kernels: LinearKernels | None) -> None:
        assert kernels is not None
        stored = stored_kind(kernels, layer.in_features)
        assert stored is not None
        parts = () if layer.weight.is_meta else layer.parts
        found = [self._read(part) for part in parts]
        wholes = [whole.expand(len(scale), 1) for _, scale, whole in found]
        if stored == "NVFP4":
            blocks = [gguf_blocks(numbers, scale) for numbers, scale, _ in found]
            layer.pack(kernels, stored, blocks, wholes)
        else:
            scales = [
                torch.cat((scale.float(), whole), dim=1)
                for (_, scale, _), whole in zip(found, wholes, strict=True)
            ]
            layer.pack(kernels, stored, [numbers for numbers, *_ in found], scales)
        self._parts.clear()

    def widen(self, layer: Linear) -> torch.Tensor:
        table, parts = torch.tensor(_NUMBERS), []
        for part in layer.parts:
            numbers, scale, whole = self._read(part)
            codes = torch.stack((numbers & 15, numbers >> 4), dim=-1).flatten(1).int()
            values = table[codes & 7] * (1 - (codes >> 3) * 2)
            groups = values.view(len(values), -1, GROUP)
            parts.append((groups * (scale.float() * whole)[..., None]).flatten(1))
        return torch.cat(parts)

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        return layer.multiply_packed(x)

    def _read(self, part: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return numbers, scales and the factor [1] float32 of the tensor.

        Raises `ValueError` for scales that no quantiser writes.
        """
        stored = self._parts[part]
        scales = stored["scales"].read()
        if not bool(scales.float().isfinite().all()):
            raise stored["scales"].fault("holds NaN")
        return stored["numbers"].read(), scales, self._scale_of(stored["whole"])

    def _scale_of(self, tensor: StoredTensor) -> torch.Tensor:
        """Return the scale [1] float32 of a tensor."""
        scale = tensor.read().float().view(1)
        if self._writer == "compressed":
            scale = 1 / scale
        # Products with activations of 4 bits multiply by the reciprocal, which must be finite too.
        smallest = torch.finfo(torch.float32).tiny
        if not bool(((scale >= smallest) & (scale <= LARGEST_SCALE)).all()):
            raise tensor.fault(
                f"must hold a scale above {smallest:.3g} and up to {LARGEST_SCALE:g}, got "
                f"{scale.item():g}"
            )
        return scale


class ByFP4(NVFP4):
    """NVFP4 weights that multiply activations of 4 bits (`kernels.fp4`).

    A kind is "nvfp4 WRITER fp4", with " rows" at its end if parts of the layer differ in the
    tensor's scale.

    Attributes:
        weight: [N, K / 2] uint8.
        weight_scale: `in_tiles` of [N, K / 16] e4m3.
        product_scale: [1], or [N] by rows, float32.
        input_factor: [1] float32. Of fused parts, that of the largest scale.
    """

    keeps_inputs = True

    def finish(self, layer: Linear, kernels: LinearKernels | None) -> None:
        rows, columns = layer.out_features, layer.in_features
        is_meta, weight = layer.weight.is_meta, layer.weight
        found = [] if is_meta else [self._read(part) for part in layer.parts]
        wholes = torch.cat([whole for *_, whole in found]) if found else torch.empty(0)
        if len(set(wholes.tolist())) > 1:
            self.kind += _BY_ROWS
        by_rows = self.kind.endswith(_BY_ROWS)
        with weight.device:
            layer.hold("weight", (rows, columns // 2), torch.uint8)
            layer.hold("weight_scale", tiled_shape(rows, columns // GROUP), E4M3)
            layer.hold("product_scale", (rows if by_rows else 1,), torch.float32)
            layer.hold("input_factor", (1,), torch.float32)
        if is_meta:
            return
        layer.weight.copy_(torch.cat([numbers for numbers, *_ in found]))
        layer.weight_scale.copy_(in_tiles(torch.cat([scales for _, scales, _ in found])))
        inputs = [self._scale_of(self._parts[part]["inputs"]) for part in layer.parts]
        scale = torch.cat(inputs).amax(0, keepdim=True)
        held: Any = layer
        held.input_factor.copy_(1 / scale)
        sizes = torch.tensor(list(layer.parts.values()))
        by = wholes.repeat_interleave(sizes) if by_rows else wholes[:1]
        held.product_scale.copy_(by * scale)
        self._parts.clear()

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        held: Any = layer
        numbers, scales = ops.quantize_fp4(x, held.input_factor)
        result: torch.Tensor = ops.fp4_linear(
            numbers,
            scales,
            layer.weight,
            layer.weight_scale,
            held.product_scale,
            layer.bias,
            x.dtype,
        )
        return result


def takes_fp4(layer: Linear, device: torch.device) -> bool:
    """Return whether the device multiplies activations of 4 bits by a layer of this shape."""
    sizes = layer.in_features % _FP4_COLUMNS, layer.out_features % _FP4_ROWS
    return sizes == (0, 0) and ops.fp4_obstacle(device) is None


def stored_kind(kernels: LinearKernels, columns: int) -> str | None:
    """Return the kind in which kernels pack rows of so many columns, or None if they do not."""
    for kind, block in _STORED.items():
        if columns % block == 0 and kernels.layout(kind, columns) is not None:
            return kind
    return None


def gguf_blocks(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return numbers [rows, columns / 2] and e4m3 scales [rows, columns / 16] as rows of ggml's
    block_nvfp4.

    A block is four scales and 32 bytes. Of each eight bytes, the low halves are the first 8
    columns.
    """
    rows = len(numbers)
    halves = numbers.view(rows, -1, 2, GROUP // 4)
    ordered = regrouped(halves[:, :, 0], halves[:, :, 1]).view(rows, -1, 32)
    four = scales.view(torch.uint8).view(rows, -1, 4)
    return torch.cat((four, ordered), dim=-1).flatten(1)


def describe(kind: str) -> str:
    """Return the name that is shown to users."""
    return "nvfp4, activations of 4 bits" if FP4 in kind else "nvfp4"


def make_method(kind: str) -> NVFP4:
    return ByFP4(kind) if FP4 in kind else NVFP4(kind)
