"""Triton kernels of products with quantised weights: 8 bits by 8 bits, and 16 or 32 bits by weights
of 4 or 8 bits, which are widened tile by tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .packed_numbers import even_and_odd, nibbles, whole_bytes

# Programs of this many blocks of tokens run one after another, so they find weights in the cache.
_ROWS_TOGETHER = tl.constexpr(8)


@triton.jit
def _blocks(tokens, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the program's first token and first column of [tokens, columns]."""
    program = tl.program_id(0)
    across = tl.cdiv(columns, BLOCK_N)
    band = program // (_ROWS_TOGETHER * across)
    high = tl.minimum(tl.cdiv(tokens, BLOCK_M) - band * _ROWS_TOGETHER, _ROWS_TOGETHER)
    within = program % (_ROWS_TOGETHER * across)
    return (band * _ROWS_TOGETHER + within % high) * BLOCK_M, (within // high) * BLOCK_N


@triton.jit
def _widened(code, MANTISSA: tl.constexpr):
    """Return bits of e4m3 (MANTISSA 3) or e5m2 (2) as float16, which can represent all of them."""
    bits = code.to(tl.int16)
    if MANTISSA == 2:
        return (bits << 8).to(tl.float16, bitcast=True)
    number = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), number).to(tl.float16)


@triton.jit(do_not_specialize=["tokens"])
def scaled_linear_kernel(
    x,
    x_scale,
    weight,
    weight_scale,
    bias,
    out,
    tokens,
    columns,
    size,
    x_stride,
    weight_stride,
    x_scale_stride,
    weight_scale_stride,
    x_group,
    weight_rows,
    weight_columns,
    PER_BLOCK: tl.constexpr,
    X_MANTISSA: tl.constexpr,
    WEIGHT_MANTISSA: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply x [tokens, size] by weight [columns, size] and write out [tokens, columns],
    contiguous.

    The scale of x[m, k] lies at m * x_scale_stride + k // x_group, that of weight[n, k] at n //
    weight_rows * weight_scale_stride + k // weight_columns. PER_BLOCK: scales change along k, at
    multiples of BLOCK_K. MANTISSA above 0: the factor is FP8 as bits and is widened. WHOLE: size is
    a multiple of BLOCK_K.
    """
    first_m, first_n = _blocks(tokens, columns, BLOCK_M, BLOCK_N)
    m = first_m + tl.arange(0, BLOCK_M)
    n = first_n + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    row = m.to(tl.int64)
    x_place = x + row[:, None] * x_stride + k[None, :]
    weight_place = weight + n.to(tl.int64)[None, :] * weight_stride + k[:, None]
    x_scale_row = x_scale + row * x_scale_stride
    weight_scale_row = weight_scale + (n // weight_rows).to(tl.int64) * weight_scale_stride
    live_m = m < tokens
    live_n = n < columns
    integers: tl.constexpr = x.dtype.element_ty == tl.int8 and not PER_BLOCK
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.int32 if integers else tl.float32)
    for begin in range(0, size, BLOCK_K):
        live_x = live_m[:, None]
        live_weight = live_n[None, :]
        if not WHOLE:
            live_x = live_x & (begin + k < size)[None, :]
            live_weight = live_weight & (begin + k < size)[:, None]
        left = tl.load(x_place + begin, mask=live_x, other=0.0)
        right = tl.load(weight_place + begin, mask=live_weight, other=0.0)
        if X_MANTISSA > 0:
            left = _widened(left, X_MANTISSA)
            right = _widened(right, WEIGHT_MANTISSA)
        if PER_BLOCK:
            of_x = tl.load(x_scale_row + begin // x_group, mask=live_m, other=0.0)
            of_weight = tl.load(weight_scale_row + begin // weight_columns, mask=live_n, other=0.0)
            part = tl.dot(left, right).to(tl.float32)
            total += part * (of_x[:, None] * of_weight[None, :])
        else:
            # Matrix instructions keep 14 bits of sums of FP8 products, so add up outside of them.
            total += tl.dot(left, right, max_num_imprecise_acc=BLOCK_K)
    result = total.to(tl.float32)
    if not PER_BLOCK:
        of_x = tl.load(x_scale_row, mask=live_m, other=0.0)
        of_weight = tl.load(weight_scale_row, mask=live_n, other=0.0)
        result = result * of_x[:, None] * of_weight[None, :]
    if HAS_BIAS:
        result += tl.load(bias + n, mask=live_n, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + row[:, None] * columns + n[None, :],
        result.to(out.dtype.element_ty),
        mask=live_m[:, None] & live_n[None, :],
    )


@triton.jit(do_not_specialize=["tokens"])
def weight_only_linear_kernel(
    x,
    weight,
    scale,
    zero,
    bias,
    out,
    tokens,
    columns,
    size,
    x_stride,
    weight_stride,
    scale_stride,
    BITS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    NATIVE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply x [tokens, size] by a weight [columns, size] of BITS and write out [tokens,
    columns], contiguous. A group is PER_GROUP times BLOCK_K columns; 0: the whole row.

    The weight is the left factor, because matrix instructions can read that from registers, where
    it was widened. Two 4-bit numbers of a byte are multiplied separately, by even and by odd
    columns of x. The scale of a group multiplies sums. NATIVE: see `packed_numbers`.
    """
    first_m, first_n = _blocks(tokens, columns, BLOCK_M, BLOCK_N)
    m = first_m + tl.arange(0, BLOCK_M)
    n = first_n + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    packed = tl.arange(0, BLOCK_K * BITS // 8)
    # Rows beyond the last read the last one, and are not written.
    row = tl.minimum(m, tokens - 1).to(tl.int64)
    column = tl.minimum(n, columns - 1).to(tl.int64)
    scale_row = column * scale_stride
    x_place = x + row[:, None] * x_stride + k[None, :]
    weight_place = weight + column[:, None] * weight_stride + packed[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for begin in range(0, size, BLOCK_K):
        if WHOLE:
            right = tl.load(x_place + begin)
            number = tl.load(weight_place + begin * BITS // 8)
        else:
            right = tl.load(x_place + begin, mask=(begin + k < size)[None, :], other=0.0)
            inside = begin * BITS // 8 + packed < size * BITS // 8
            number = tl.load(weight_place + begin * BITS // 8, mask=inside[None, :], other=0)
        group = scale_row
        if PER_GROUP > 0:
            group += begin // (BLOCK_K * PER_GROUP)
        of_group = tl.load(scale + group)
        middle = tl.load(zero + group).to(tl.float32)
        if BITS == 4:
            low, high = nibbles(number, middle, right, NATIVE)
            even, odd = even_and_odd(right)
            part = tl.dot(low, tl.trans(even), input_precision="ieee")
            part = tl.dot(high, tl.trans(odd), part, input_precision="ieee")
        else:
            left = whole_bytes(number, middle, right)
            part = tl.dot(left, tl.trans(right), input_precision="ieee")
        total += part * of_group.to(tl.float32)[:, None]
    if HAS_BIAS:
        total += tl.load(bias + column).to(tl.float32)[:, None]
    tl.store(
        out + row[None, :] * columns + n[:, None],
        total.to(out.dtype.element_ty),
        mask=(m < tokens)[None, :] & (n < columns)[:, None],
    )
