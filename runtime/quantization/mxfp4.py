"""MXFP4 (OCP Microscaling Formats 1.0) as in checkpoints of GPT-OSS.

Each block of 32 numbers of 4 bits has a power of two as its scale.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from ...kernels.linear import LinearKernels
from ..config.quantization_registry import PLAIN, Scheme
from ..layers.linear import Axis, Linear, Place, StoredTensor
from .config import Patterns, names

QUANT_METHOD = "mxfp4"
_KIND = "mxfp4 MXFP4"
_STORED = "MXFP4"
_BLOCK = 32
# Twice the values of the numbers of 4 bits (e2m1).
_DOUBLES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_BIAS = 128  # One more than the bias of the powers of two (e8m0), because the values are doubled.
# The largest power that float16 holds. Powers that are too small for it become 0.
_LARGEST = _BIAS + 15


def read_scheme(config: Mapping[str, Any]) -> Scheme:
    matches = Patterns().matcher(names(config, "modules_to_not_convert"), parts=True)
    return lambda name: _KIND if ".experts." in name and not matches(name) else PLAIN


class MXFP4:
    """The `LinearMethod` of experts.

    Parts have blocks [rows, columns / 32, 16] of bytes, the earlier column in the low half, and
    scales [rows, columns / 32].
    """

    kind = _KIND

    def __init__(self) -> None:
        self._parts: defaultdict[str, dict[str, StoredTensor]] = defaultdict(dict)

    def create(self, layer: Linear) -> None:
        if layer.in_features % _BLOCK:
            raise ValueError(
                f"weights in blocks of {_BLOCK} need rows of a multiple of {_BLOCK} numbers, but a "
                f"layer's have {layer.in_features}; take another checkpoint"
            )
        layer.hold("weight", (0,), torch.uint8)

    def places(self, layer: Linear, part: str) -> Mapping[str, Place]:
        def place(name: str, *shape: int) -> Place:
            def load(tensor: StoredTensor) -> None:
                self._parts[part][name] = tensor

            axes = Axis(0), Axis(1, _BLOCK)
            return Place([shape], load, (torch.uint8,), rows=axes[0], columns=axes[1])

        rows, groups = layer.parts[part], layer.in_features // _BLOCK
        return {
            "blocks": place("blocks", rows, groups, 16),
            "scales": place("scales", rows, groups),
        }

    def finish(self, layer: Linear, kernels: LinearKernels | None) -> None:
        assert kernels is not None
        parts = () if layer.weight.is_meta else layer.parts
        layer.pack(kernels, _STORED, [gguf_blocks(*self._codes(part)) for part in parts])
        self._parts.clear()

    def widen(self, layer: Linear) -> torch.Tensor:
        parts = []
        for part in layer.parts:
            codes, scales = self._codes(part)
            powers = (scales.int() - _BIAS).unsqueeze(-1)
            doubles = torch.tensor(_DOUBLES, dtype=torch.int8)[codes.int()]
            parts.append(torch.ldexp(doubles.float(), powers).flatten(1))
        return torch.cat(parts)

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        return layer.multiply_packed(x)

    def _codes(self, part: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the codes of numbers [rows, groups, 32] and of scales [rows, groups]."""
        stored = self._parts[part]
        codes, scales = stored["blocks"].read(), stored["scales"].read()
        if scales.numel() and int(scales.max()) > _LARGEST:
            raise stored["scales"].fault("has scales that are too large")
        return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2), scales


def gguf_blocks(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return codes [rows, groups, 32] and scales [rows, groups], uint8, as rows of ggml's
    block_mxfp4.

    A block is a scale and 16 bytes. The low halves of the bytes are the first 16 columns.
    """
    halves = codes[..., :16] | codes[..., 16:] << 4
    return torch.cat((scales.unsqueeze(-1), halves), dim=-1).flatten(1)


def describe(kind: str) -> str:
    """Return the name that is shown to users."""
    return "mxfp4"


def make_method(kind: str) -> MXFP4:
    return MXFP4()
