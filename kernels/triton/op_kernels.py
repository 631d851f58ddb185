"""Triton kernels of the ops between matrix products: one pass over memory each, rounding where
`kernels.reference` rounds.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _normalised(x, weight, eps, SIZE: tl.constexpr):
    """x [BLOCK] float32, 0 beyond SIZE: x / sqrt(mean(x^2) + eps), rounded, times weight [BLOCK] in
    its dtype.
    """
    scaled = (x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)).to(weight.dtype)
    return scaled.to(tl.float32) * weight.to(tl.float32)


@triton.jit
def rms_norm_kernel(
    x,
    weight,
    out,
    outer_stride,
    inner_stride,
    inner_size,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program r: row (r / inner_size, r % inner_size) of x; `out` is contiguous."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    live = column < SIZE
    begin = (row // inner_size) * outer_stride + (row % inner_size) * inner_stride
    value = tl.load(x + begin + column, mask=live, other=0.0).to(tl.float32)
    result = _normalised(value, tl.load(weight + column, mask=live, other=0.0), eps, SIZE)
    tl.store(out + row * SIZE + column, result.to(out.dtype.element_ty), mask=live)


@triton.jit
def add_rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    total,
    x_stride,
    residual_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program t: row t of x + residual to `total`, and normalised to `out`; both contiguous."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    live = column < SIZE
    left = tl.load(x + row * x_stride + column, mask=live, other=0.0).to(tl.float32)
    right = tl.load(residual + row * residual_stride + column, mask=live, other=0.0).to(tl.float32)
    added = (left + right).to(total.dtype.element_ty)
    tl.store(total + row * SIZE + column, added, mask=live)
    result = _normalised(
        added.to(tl.float32), tl.load(weight + column, mask=live, other=0.0), eps, SIZE
    )
    tl.store(out + row * SIZE + column, result.to(out.dtype.element_ty), mask=live)


@triton.jit
def silu_and_mul_kernel(x, out, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Program (t, block): silu of the first half of row t times the second half."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < SIZE
    gate = tl.load(x + row * x_stride + column, mask=live, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + SIZE + column, mask=live, other=0.0).to(tl.float32)
    turned = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * SIZE + column, (turned * up).to(out.dtype.element_ty), mask=live)


@triton.jit
def rotary_kernel(
    x,
    cos,
    signed_sin,
    out,
    x_stride_t,
    x_stride_h,
    angle_stride,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (t, block): elements of token t, [HEADS, 2 * HALF], each beside its partner half a
    head away; `out` is contiguous.
    """
    token = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = element < HEADS * 2 * HALF
    head = element // (2 * HALF)
    dim = element % (2 * HALF)
    partner = (dim + HALF) % (2 * HALF)
    begin = token * x_stride_t + head * x_stride_h
    own = tl.load(x + begin + dim, mask=live, other=0.0).to(tl.float32)
    other = tl.load(x + begin + partner, mask=live, other=0.0).to(tl.float32)
    along = tl.load(cos + token * angle_stride + dim, mask=live, other=0.0).to(tl.float32)
    across = tl.load(signed_sin + token * angle_stride + dim, mask=live, other=0.0).to(tl.float32)
    left = (own * along).to(out.dtype.element_ty).to(tl.float32)
    right = (other * across).to(out.dtype.element_ty).to(tl.float32)
    tl.store(
        out + token * HEADS * 2 * HALF + element, (left + right).to(out.dtype.element_ty), mask=live
    )
