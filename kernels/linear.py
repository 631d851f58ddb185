"""The contract of linear layers whose weights a device keeps in a layout of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class LinearKernels(Protocol):
    """Products with packed weights. A `kind` names what a weight was: "bfloat16", a quantised
    format of GGUF such as "Q4_1", or numbers of 8 bits with float32 scales: "int8" and "fp8_e4m3"
    with one a row, "fp8_e4m3_blocks" with one for each 128 columns of a row; or numbers of 4 or 8
    bits that are widened to x's dtype, "weight_only 4 128 zeros", whose groups of as many columns
    have a scale and a zero point, "symmetric" where all of those are 2^(bits - 1). "mixed Q4_K 64
    Q6_K 32" names formats of GGUF and how many rows of each follow one another.

    `op(x, weight, bias, out_features, layout)`: x [T, in] in the dtype that the kernels were made
    for (bfloat16 on a CPU), `weight` as `pack` gives it, bias [out] or None, to [T, out], all of
    that dtype.

    `scaled_op(x, x_scale, weight, bias, out_features, layout)`: x and x_scale [1], [T, 1] or [T, in
    / 128] as `ops.quantize_static` and `ops.quantize_dynamic` give them, in the weight's dtype;
    None where such weights are not packed.

    `embedding_op(ids, weight, hidden, rows, layout)`: ids [T] int64 to those rows of a packed
    weight [rows, hidden] of one of GGUF's formats; None where such weights are not looked up.

    `experts_op(x, topk_ids, topk_weights, gate_up, gate_up_bias, gate_up_scale, down, down_bias,
    down_scale, sizes, layouts, groups, limit, weighs_input)`: as `ops.fused_moe`, with packed
    weights of all experts, E, I and an expert's rows of gate_up, and the layout of both; and how x
    is quantised before each, by a scale [1] or one for each group of columns, 0 where it is not.
    """

    @property
    def op(self) -> torch._ops.OpOverload: ...

    @property
    def scaled_op(self) -> torch._ops.OpOverload | None: ...

    @property
    def embedding_op(self) -> torch._ops.OpOverload | None: ...

    @property
    def experts_op(self) -> torch._ops.OpOverload | None: ...

    def takes_experts(self, sizes: Sequence[int]) -> bool:
        """Whether `experts_op` multiplies by experts with so many columns and rows a part."""
        ...

    def layout(self, kind: str, in_features: int) -> int | None:
        """How weights of this kind are packed; None for what the kernels do not know."""
        ...

    def packed_shape(self, kind: str, in_features: int, out_features: int) -> tuple[int, int]:
        """Shape of the packed weight, of uint8."""
        ...

    def pack(
        self, kind: str, parts: Sequence[torch.Tensor], scales: Sequence[torch.Tensor] = ()
    ) -> torch.Tensor:
        """The weight whose rows are those of `parts`, one after another: [rows, in] bfloat16, int8
        or float8_e4m3fn, or GGUF's blocks, [rows, bytes] uint8, or of weights alone as
        `ops.weight_only_linear` takes them.

        `scales`: of each part of 8 bits [rows, 1], or [rows, ceil(in / 128)] of blocks, float32; of
        weights alone [rows, groups, 2], the scale and the zero point of each group.
        """
        ...
