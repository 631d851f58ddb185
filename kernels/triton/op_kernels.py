"""Triton kernels of the ops between matrix products. Each passes over memory once and rounds where
`kernels.reference` rounds.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def normalised(x, weight, eps, SIZE: tl.constexpr):
    """Return x / sqrt(mean(x^2) + eps), rounded, times weight [BLOCK] in its dtype. x [BLOCK] is
    float32, 0 beyond SIZE.
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
    """Program r: row (r / inner_size, r % inner_size) of x. `out` is contiguous."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    live = column < SIZE
    begin = (row // inner_size) * outer_stride + (row % inner_size) * inner_stride
    value = tl.load(x + begin + column, mask=live, other=0.0).to(tl.float32)
    result = normalised(value, tl.load(weight + column, mask=live, other=0.0), eps, SIZE)
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
    """Program t: row t of x + residual to `total`, and normalised to `out`. Both are contiguous."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    live = column < SIZE
    left = tl.load(x + row * x_stride + column, mask=live, other=0.0).to(tl.float32)
    right = tl.load(residual + row * residual_stride + column, mask=live, other=0.0).to(tl.float32)
    added = (left + right).to(total.dtype.element_ty)
    tl.store(total + row * SIZE + column, added, mask=live)
    result = normalised(
        added.to(tl.float32), tl.load(weight + column, mask=live, other=0.0), eps, SIZE
    )
    tl.store(out + row * SIZE + column, result.to(out.dtype.element_ty), mask=live)


@triton.jit
def gated(row, column, SIZE: tl.constexpr):
    """Return silu of the first half of `row`, [2 * SIZE], times the second half, at these columns,
    and 0 beyond SIZE.
    """
    live = column < SIZE
    gate = tl.load(row + column, mask=live, other=0.0).to(tl.float32)
    up = tl.load(row + SIZE + column, mask=live, other=0.0)
    turned = (gate / (1.0 + tl.exp(-gate))).to(up.dtype).to(tl.float32)
    return (turned * up.to(tl.float32)).to(up.dtype)


@triton.jit
def silu_and_mul_kernel(x, out, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Program (t, block): BLOCK columns of row t."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + row * SIZE + column, gated(x + row * x_stride, column, SIZE), mask=column < SIZE)


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
    """Program (t, block): elements of token t, [HEADS, 2 * HALF], each with its partner half a head
    away. `out` is contiguous.
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


@triton.jit
def norm_rotary_kernel(
    q,
    k,
    q_weight,
    k_weight,
    cos,
    signed_sin,
    out,
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    angle_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (t, block): ROWS of the heads of q and then k of token t, normalised and rotated, to
    out [T, HEADS + KV_HEADS, 2 * HALF], contiguous. A head is [2, BLOCK], with its halves beside
    each other.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    dim = tl.arange(0, BLOCK)[None, :]
    is_q = head < HEADS
    of_q = is_q & (dim < HALF)
    of_k = (head >= HEADS) & (head < HEADS + KV_HEADS) & (dim < HALF)
    q_place = q + token * q_stride_t + head * q_stride_h + dim
    k_place = k + token * k_stride_t + (head - HEADS) * k_stride_h + dim
    first = _one_of(is_q, q_place, k_place, of_q, of_k)
    last = _one_of(is_q, q_place + HALF, k_place + HALF, of_q, of_k)
    squares = tl.sum(first * first + last * last, 1)[:, None]
    factor = tl.rsqrt(squares / (2 * HALF) + eps)
    first_weight = _one_of(is_q, q_weight + dim, k_weight + dim, of_q, of_k)
    last_weight = _one_of(is_q, q_weight + HALF + dim, k_weight + HALF + dim, of_q, of_k)
    first = _rounded(_rounded(first * factor, out) * first_weight, out)
    last = _rounded(_rounded(last * factor, out) * last_weight, out)
    live = dim < HALF
    angle = token * angle_stride + dim
    first_cos = tl.load(cos + angle, mask=live, other=0.0).to(tl.float32)
    last_cos = tl.load(cos + angle + HALF, mask=live, other=0.0).to(tl.float32)
    first_sin = tl.load(signed_sin + angle, mask=live, other=0.0).to(tl.float32)
    last_sin = tl.load(signed_sin + angle + HALF, mask=live, other=0.0).to(tl.float32)
    place = out + (token * (HEADS + KV_HEADS) + head) * 2 * HALF + dim
    turned = _rounded(first * first_cos, out) + _rounded(last * first_sin, out)
    tl.store(place, turned.to(out.dtype.element_ty), mask=of_q | of_k)
    turned = _rounded(last * last_cos, out) + _rounded(first * last_sin, out)
    tl.store(place + HALF, turned.to(out.dtype.element_ty), mask=of_q | of_k)


@triton.jit
def _one_of(is_first, first, second, of_first, of_second):
    """Load from one of two addresses, as float32."""
    one = tl.load(first, mask=of_first, other=0.0)
    other = tl.load(second, mask=of_second, other=0.0)
    return tl.where(is_first, one, other).to(tl.float32)


@triton.jit
def _rounded(number, out):
    """Return float32 `number` rounded to the dtype of `out`."""
    return number.to(out.dtype.element_ty).to(tl.float32)
