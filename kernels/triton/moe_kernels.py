"""The Triton kernel of layers of experts: rows times the weight of their expert."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def expert_linear_kernel(
    x,
    sources,
    weight,
    bias,
    out,
    experts,
    firsts,
    ends,
    columns,
    size,
    x_stride,
    HAS_BIAS: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply a block of rows of one expert by BLOCK_N rows of its weight: rows sources[i] of x by
    weight [E, columns, size] into out [P, columns], contiguous.

    `experts`: the expert of each block, -1 if the block has no rows. `firsts`: the block's first
    row of out. `ends`: the row after the last of each expert. WHOLE: size is a multiple of BLOCK_K.
    """
    block = tl.program_id(0)
    expert = tl.load(experts + block)
    if expert >= 0:
        m = tl.load(firsts + block) + tl.arange(0, BLOCK_M)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        live_m = m < tl.load(ends + expert)
        live_n = n < columns
        source = tl.load(sources + m, mask=live_m, other=0).to(tl.int64)
        x_place = x + source[:, None] * x_stride + k[None, :]
        weight_row = expert.to(tl.int64) * columns + n
        weight_place = weight + weight_row[None, :] * size + k[:, None]
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for begin in range(0, size, BLOCK_K):
            live_x = live_m[:, None]
            live_weight = live_n[None, :]
            if not WHOLE:
                live_x = live_x & (begin + k < size)[None, :]
                live_weight = live_weight & (begin + k < size)[:, None]
            left = tl.load(x_place + begin, mask=live_x, other=0.0)
            right = tl.load(weight_place + begin, mask=live_weight, other=0.0)
            total += tl.dot(left, right, input_precision="ieee")
        if HAS_BIAS:
            total += tl.load(bias + weight_row, mask=live_n, other=0.0).to(tl.float32)[None, :]
        tl.store(
            out + m.to(tl.int64)[:, None] * columns + n[None, :],
            total.to(out.dtype.element_ty),
            mask=live_m[:, None] & live_n[None, :],
        )
