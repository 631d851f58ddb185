"""Triton kernels of products with weights in blocks that stay packed (`packed_formats`)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _e4m3(code):
    """Return bits of float8_e4m3fn as float32."""
    bits = code.to(tl.int16)
    number = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    return number.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def _e2m1(code):
    """Return bits of a 4-bit float as float32."""
    bits = code.to(tl.int16)
    number = ((bits & 8) << 12) | ((bits & 7) << 9)
    return number.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def _number(code, NUMBER: tl.constexpr, OFFSET: tl.constexpr):
    """Return the numbers of codes as float32, before their scale."""
    if NUMBER == "e2m1":
        return _e2m1(code)
    if NUMBER == "e4m3":
        return _e4m3(code)
    # 2^23 + n: the mantissa's last digit counts ones.
    number = (code.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)
    return number - (8388608.0 + OFFSET)


@triton.jit
def _sub_scale(of_row, group, SCALE: tl.constexpr):
    """Return the scale of a group that is kept in a byte."""
    code = tl.load(of_row + group)
    if SCALE == "power":
        # A power of two that is too small for a normal float becomes 0.
        return (code.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    if SCALE == "e4m3":
        return _e4m3(code)
    if SCALE == "signed":
        return code.to(tl.int8, bitcast=True).to(tl.float32)
    return code.to(tl.float32)


@triton.jit
def _shared(weight, row, j, unit, row_bytes, BITS: tl.constexpr):
    """Return the bytes that hold the 4-bit numbers of a unit [N, 32]."""
    shared = 0
    if BITS == 4:
        shared = tl.load((weight + row * row_bytes)[:, None] + (unit * 32 + j)[None, :])
    return shared


@triton.jit
def half_unit(
    shared, weight, halves, floats, row, j, unit, row_bytes, high_at, sub_at, min_at, super_at,
    HALF: tl.constexpr, BITS: tl.constexpr, HIGH: tl.constexpr, NUMBER: tl.constexpr,
    OFFSET: tl.constexpr, SCALE: tl.constexpr, MIN: tl.constexpr, GROUP: tl.constexpr,
    PLACES: tl.constexpr,
):  # fmt: skip
    """Return columns 64 * unit + 32 * HALF + j, j [32], of rows `row` [N] of a packed weight, as
    float32 [N, 32]. `shared` are the bytes of 4-bit numbers, which both halves read.

    `weight`, `halves` and `floats` are the same memory as bytes, float16 and float32. Planes of a
    row begin at the bytes `..._at`. See `packed_formats.Format` for the constants. PLACES: groups
    of 32 columns that share a scale; 0: all.
    """
    of_row = weight + row * row_bytes
    group = 2 * unit + HALF
    if BITS == 4:
        code = shared & 15 if HALF == 0 else shared >> 4
    else:
        code = tl.load(of_row[:, None] + (group * 32 + j)[None, :])
    if HIGH > 0:
        PER_BYTE: tl.constexpr = 8 // HIGH
        high = tl.load(of_row[:, None] + (high_at + group // PER_BYTE * 32 + j)[None, :])
        code |= ((high >> (HIGH * (group % PER_BYTE))) & ((1 << HIGH) - 1)) << 4
    number = _number(code, NUMBER, OFFSET)
    place = group // PLACES if PLACES > 0 else 0
    if MIN == "zero":
        number -= tl.load(of_row + min_at + place).to(tl.float32)[:, None]
    PAIRS: tl.constexpr = 2 if (MIN == "half" or MIN == "sub") else 1
    if SCALE == "float" or SCALE == "e4m3":
        factor = tl.load(floats + row * (row_bytes // 4) + super_at // 4 + place)
    elif SCALE == "power":
        factor = 1.0
    else:
        of_super = halves + row * (row_bytes // 2) + super_at // 2 + place * PAIRS
        factor = tl.load(of_super).to(tl.float32)
    if SCALE == "half" or SCALE == "float":
        value = number * factor[:, None]
    elif GROUP == 16:
        first = _sub_scale(of_row, sub_at + 2 * group, SCALE) * factor
        second = _sub_scale(of_row, sub_at + 2 * group + 1, SCALE) * factor
        value = number * tl.where((j < 16)[None, :], first[:, None], second[:, None])
    else:
        value = number * (_sub_scale(of_row, sub_at + group, SCALE) * factor)[:, None]
    if MIN == "half":
        value += tl.load(of_super + 1).to(tl.float32)[:, None]
    elif MIN == "sub":
        lowest = tl.load(of_row + min_at + group).to(tl.float32)
        value -= (tl.load(of_super + 1).to(tl.float32) * lowest)[:, None]
    return value


@triton.jit
def _accumulate(
    x_row, live_m, weight, halves, floats, row, size, row_bytes, high_at, sub_at, min_at, super_at,
    total, factor,
    WEIGHED: tl.constexpr, WHOLE: tl.constexpr, UNITS: tl.constexpr, BITS: tl.constexpr,
    HIGH: tl.constexpr, NUMBER: tl.constexpr, OFFSET: tl.constexpr, SCALE: tl.constexpr,
    MIN: tl.constexpr, GROUP: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Add the products of rows of x, at `x_row` [M], and rows `row` [N] of the weight to total
    [N, M]. WEIGHED: rows of x are multiplied by `factor` [M]. An iteration has UNITS of 64 columns.
    """
    j = tl.arange(0, 32)
    for begin in range(0, size, 64 * UNITS):
        for half in tl.static_range(2 * UNITS):
            if half % 2 == 0:
                shared = _shared(weight, row, j, begin // 64 + half // 2, row_bytes, BITS)
            column = begin + half * 32 + j
            live = live_m[:, None]
            if not WHOLE:
                live = live & (column < size)[None, :]
            right = tl.load(x_row[:, None] + column[None, :], mask=live, other=0.0)
            if WEIGHED:
                right = (right.to(tl.float32) * factor[:, None]).to(right.dtype)
            left = half_unit(
                shared, weight, halves, floats, row, j, begin // 64 + half // 2, row_bytes,
                high_at, sub_at, min_at, super_at, half % 2, BITS, HIGH, NUMBER,
                OFFSET, SCALE, MIN, GROUP, PLACES,
            )  # fmt: skip
            total = tl.dot(left.to(right.dtype), tl.trans(right), total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["tokens"])
def packed_linear_kernel(
    x, weight, halves, floats, bias, out, tokens, columns, size, x_stride, out_stride, row_bytes,
    high_at, sub_at, min_at, super_at,
    HAS_BIAS: tl.constexpr, WHOLE: tl.constexpr, UNITS: tl.constexpr, BITS: tl.constexpr,
    HIGH: tl.constexpr, NUMBER: tl.constexpr, OFFSET: tl.constexpr, SCALE: tl.constexpr,
    MIN: tl.constexpr, GROUP: tl.constexpr, PLACES: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Multiply x [tokens, size] by a packed weight of `columns` rows, into `columns` columns of
    rows of out.
    """
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live_m = m < tokens
    # Rows beyond the last read the last one, and are not written.
    row = tl.minimum(n, columns - 1).to(tl.int64)
    x_row = x + m.to(tl.int64) * x_stride
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    total = _accumulate(
        x_row, live_m, weight, halves, floats, row, size, row_bytes, high_at, sub_at, min_at,
        super_at, total, 1.0, False, WHOLE, UNITS, BITS, HIGH, NUMBER, OFFSET, SCALE,
        MIN, GROUP, PLACES,
    )  # fmt: skip
    if HAS_BIAS:
        total += tl.load(bias + row).to(tl.float32)[:, None]
    tl.store(
        out + m.to(tl.int64)[None, :] * out_stride + n[:, None],
        total.to(out.dtype.element_ty),
        mask=live_m[None, :] & (n < columns)[:, None],
    )


@triton.jit
def packed_experts_kernel(
    x, order, pair_weights, weight, halves, floats, bias, out, experts, firsts, ends, columns,
    size, x_stride, row_bytes, high_at, sub_at, min_at, super_at,
    EACH: tl.constexpr, WEIGHED: tl.constexpr, SPREADS: tl.constexpr, HAS_BIAS: tl.constexpr,
    WHOLE: tl.constexpr, UNITS: tl.constexpr, BITS: tl.constexpr, HIGH: tl.constexpr,
    NUMBER: tl.constexpr, OFFSET: tl.constexpr, SCALE: tl.constexpr, MIN: tl.constexpr,
    GROUP: tl.constexpr, PLACES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`moe_kernels.expert_linear_kernel` with a packed weight, `columns` rows per expert."""
    block = tl.program_id(0)
    expert = tl.load(experts + block)
    if expert >= 0:
        m = tl.load(firsts + block) + tl.arange(0, BLOCK_M)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        live_m = m < tl.load(ends + expert)
        pair = tl.load(order + m, mask=live_m, other=0)
        source = pair // EACH if EACH > 0 else m
        row = expert.to(tl.int64) * columns + tl.minimum(n, columns - 1)
        x_row = x + source.to(tl.int64) * x_stride
        factor = 1.0
        if WEIGHED:
            factor = tl.load(pair_weights + pair, mask=live_m, other=0.0)
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        total = _accumulate(
            x_row, live_m, weight, halves, floats, row, size, row_bytes, high_at, sub_at, min_at,
            super_at, total, factor, WEIGHED, WHOLE, UNITS, BITS, HIGH, NUMBER, OFFSET,
            SCALE, MIN, GROUP, PLACES,
        )  # fmt: skip
        if HAS_BIAS:
            total += tl.load(bias + row).to(tl.float32)[:, None]
        target = pair if SPREADS else m
        tl.store(
            out + target.to(tl.int64)[None, :] * columns + n[:, None],
            total.to(out.dtype.element_ty),
            mask=live_m[None, :] & (n < columns)[:, None],
        )


@triton.jit
def packed_rows_kernel(
    ids, weight, halves, floats, out, size, rows, row_bytes, high_at, sub_at, min_at, super_at,
    BITS: tl.constexpr, HIGH: tl.constexpr, NUMBER: tl.constexpr, OFFSET: tl.constexpr,
    SCALE: tl.constexpr, MIN: tl.constexpr, GROUP: tl.constexpr, PLACES: tl.constexpr,
    UNITS: tl.constexpr,
):  # fmt: skip
    """Program (t, block): UNITS of 64 columns of row ids[t] of a packed weight, to out."""
    token = tl.program_id(0).to(tl.int64)
    own = tl.load(ids + token)
    own = tl.minimum(tl.maximum(own, 0), rows - 1)
    unit = tl.program_id(1) * UNITS
    j = tl.arange(0, 32)
    row = own + tl.zeros((1,), tl.int64)
    for half in tl.static_range(2 * UNITS):
        column = unit * 64 + half * 32 + j
        if unit * 64 + half * 32 < size:
            shared = _shared(weight, row, j, unit + half // 2, row_bytes, BITS)
            value = half_unit(
                shared, weight, halves, floats, row, j, unit + half // 2, row_bytes, high_at,
                sub_at, min_at, super_at, half % 2, BITS, HIGH, NUMBER, OFFSET, SCALE,
                MIN, GROUP, PLACES,
            )  # fmt: skip
            tl.store(
                out + token * size + column[None, :],
                value.to(out.dtype.element_ty),
                mask=(column < size)[None, :],
            )
