"""The contract of linear layers whose weights a device keeps in a layout of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class LinearKernels(Protocol):
    """Products with packed weights. A `kind` names what a weight was: "bfloat16", or a quantised
    format of GGUF such as "Q4_1".

    `op(x, weight, bias, out_features, layout)`: x [T, in] bfloat16, `weight` as `pack` gives it,
    bias [out] or None, to [T, out].
    """

    op: torch._ops.OpOverload

    def layout(self, kind: str, in_features: int) -> int | None:
        """How weights of this kind are packed; None for what the kernels do not know."""
        ...

    def packed_shape(self, layout: int, in_features: int, out_features: int) -> tuple[int, int]:
        """Shape of the packed weight, of uint8."""
        ...

    def pack(self, kind: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The weight whose rows are those of `parts`, one after another: [rows, in] bfloat16, or
        GGUF's blocks, [rows, bytes] uint8.
        """
        ...
