"""The contract of linear layers whose weights a device stores in a packed layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class LinearKernels(Protocol):
    """Products with packed weights.

    A `kind` names what a weight was before packing:

    - "bfloat16", or a GGUF format such as "Q4_1";
    - "int8" and "fp8_e4m3": 8-bit numbers with a float32 scale per row;
    - "fp8_e4m3_blocks": with a float32 scale for each 128 columns of a row;
    - "nvfp4": numbers of e2m1, with an e4m3 scale for each 16 columns and one of the tensor;
    - "weight_only 4 128 zeros": numbers of 4 or 8 bits that are widened to x's dtype, with a scale
      and a zero point for each group of 128 columns; "symmetric" if all zero points are 2^(bits -
      1);
    - "mixed Q4_K 64 Q6_K 32": consecutive rows in several GGUF formats, each with its number of
      rows.

    All activations and biases have the dtype that the kernels were made for (bfloat16 on a CPU).
    `weight` is a result of `pack`.

    `op(x, weight, bias, out_features, layout)`: x [T, in] and bias [out] or None to [T, out].

    `scaled_op(x, x_scale, weight, bias, out_features, layout)`: x and x_scale [1], [T, 1] or [T, in
    / 128] are results of `ops.quantize_static` or `ops.quantize_dynamic` in the weight's dtype.
    None if such weights are not packed.

    `embedding_op(ids, weight, hidden, rows, layout)`: ids [T] int64 to the rows of a packed GGUF
    weight [rows, hidden]. None if such weights are not looked up.

    `experts_op(x, topk_ids, topk_weights, gate_up, gate_up_bias, gate_up_scale, down, down_bias,
    down_scale, sizes, layouts, groups, limit, weighs_input)`: `ops.fused_moe` with packed weights
    of all experts. `sizes` holds E, I and an expert's rows of gate_up. `layouts` holds the layouts
    of gate_up and down. x is quantised before either product by a scale [1], or by a scale for each
    of `groups` columns; 0 means that x is not quantised.
    """

    @property
    def op(self) -> torch._ops.OpOverload: ...

    @property
    def scaled_op(self) -> torch._ops.OpOverload | None: ...

    @property
    def embedding_op(self) -> torch._ops.OpOverload | None: ...

    @property
    def experts_op(self) -> torch._ops.OpOverload | None: ...

    @property
    def keeps_blocks(self) -> bool:
        """Whether weights of a GGUF file stay in their blocks. False: the device multiplies numbers
        several times as fast.
        """
        ...

    def experts(self, sizes: Sequence[int]) -> LinearKernels | None:
        """Return the kernels of layers of experts with these numbers of columns and rows per rank,
        which may take other kinds. None: `experts_op` does not support them.
        """
        ...

    def layout(self, kind: str, in_features: int) -> int | None:
        """Return the layout of weights of this kind, or None if the kernels do not support it."""
        ...

    def packed_shape(self, kind: str, in_features: int, out_features: int) -> tuple[int, int]:
        """Return the shape of the packed uint8 weight."""
        ...

    def pack(
        self, kind: str, parts: Sequence[torch.Tensor], scales: Sequence[torch.Tensor] = ()
    ) -> torch.Tensor:
        """Pack the weight whose rows are those of `parts`, one after another.

        Parts are [rows, in] in bfloat16, int8 or float8_e4m3fn, or GGUF blocks [rows, bytes] uint8,
        or numbers as `ops.weight_only_linear` takes them.

        `scales` has one tensor per part: [rows, 1] float32 for 8 bits, [rows, ceil(in / 128)] for
        blocks, [rows, groups, 2] for weight-only numbers, the scale and the zero point of each
        group, or [rows, groups + 1] for "nvfp4", whose last one is that of the tensor. Blocks of
        GGUF's NVFP4 may have [rows, 1], the tensor's, also if they are mixed with other formats.
        """
        ...
