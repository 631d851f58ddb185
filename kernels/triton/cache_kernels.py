"""Keys and values in 8 bits in Triton, rounded and laid out as in `kernels.cache_format`.

`KIND`: 0 the queries' dtype, 1 e4m3, 2 e5m2, 3 int8. Numbers are bytes here, so that GPUs without
float8 can use them too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .quantize_kernels import fp8_code

# 1.5 * 2^23: adding it to a float32 below 2^22 rounds to a whole number.
_HALVES_TO_EVEN = tl.constexpr(12582912.0)
_LEAST_SCALE = tl.constexpr(2.0**-126)
_LARGEST = tl.constexpr(127.0)


@triton.jit
def widened(code, KIND: tl.constexpr, NATIVE: tl.constexpr):
    """Return bytes as numbers of more bits. NATIVE: by instructions for float8.

    Read with float16's exponent, which is a bit wider, e4m3 numbers are a 256th of their value.
    e5m2 is the upper half of a float16.
    """
    if NATIVE:
        return code.to(tl.float8e4nv if KIND == 1 else tl.float8e5, bitcast=True)
    elif KIND == 1:
        half = ((code.to(tl.int8, bitcast=True).to(tl.int16) << 7) & -16385).to(
            tl.float16, bitcast=True
        )
        return tl.where((code & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0)
    elif KIND == 2:
        return (code.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return code.to(tl.int8, bitcast=True).to(tl.float32)


@triton.jit
def relaid(x):
    """Return x as it is. It is widened as it was loaded, and then gets the order of matrix
    instructions: the compiler would load single bytes in that order instead, and cannot move the
    change before a split.
    """
    ROWS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    even, odd = tl.split(tl.reshape(x, (ROWS, COLUMNS // 2, 2)))
    return tl.reshape(tl.join(even, odd), (ROWS, COLUMNS))


@triton.jit
def normalised(query, scale_log2, NATIVE: tl.constexpr):
    """Return the queries [M, D] for scores, and the factor [M] of these.

    With NATIVE, keys become float16, which has all numbers of float8. Queries become float16 too,
    divided by their largest number, because bfloat16 has larger ones.
    """
    factor = tl.zeros([query.shape[0]], tl.float32) + scale_log2
    if NATIVE:
        largest = tl.max(tl.abs(query.to(tl.float32)), 1)
        largest = tl.where(largest == 0.0, 1.0, largest)
        query = (query.to(tl.float32) / largest[:, None]).to(tl.float16)
        factor *= largest
    return query, factor


@triton.jit
def _with_8_digits(number):
    """Round a float32 above 0 to the nearest bfloat16, ties to even. Triton's interpreter would
    truncate.
    """
    bits = number.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _store(
    x,
    cache,
    scales,
    scale,
    x_stride_h,
    target,
    scale_target,
    is_live,
    KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    KIND: tl.constexpr,
):
    """Store x [K, D] of one token as bytes at `cache + target`."""
    head = tl.arange(0, HEADS_BLOCK)
    dim = tl.arange(0, BLOCK)
    live = (head < KV_HEADS)[:, None] & (dim < HEAD)[None, :] & is_live
    value = tl.load(x + head[:, None] * x_stride_h + dim[None, :], mask=live, other=0.0)
    value = value.to(tl.float32)
    if KIND == 3:
        # tl.max drops NaN, but a head with NaN must become NaN.
        largest = tl.max(tl.where(value != value, float("inf"), tl.abs(value)), 1)
        kept = _with_8_digits(tl.maximum(tl.div_rn(largest, _LARGEST), _LEAST_SCALE))
        place = scales + scale_target + head * PAGE
        tl.store(place, kept.to(tl.bfloat16), mask=(head < KV_HEADS) & is_live)
        number = tl.div_rn(value, tl.broadcast_to(kept[:, None], value.shape))
        number = tl.minimum(tl.maximum(number, -_LARGEST), _LARGEST)
        code = ((number + _HALVES_TO_EVEN) - _HALVES_TO_EVEN).to(tl.int8).to(tl.uint8, bitcast=True)
    else:
        number = tl.div_rn(value, tl.zeros_like(value) + scale)
        MOST: tl.constexpr = 448.0 if KIND == 1 else 57344.0
        held = tl.minimum(tl.maximum(number, -MOST), MOST)
        held = tl.where(number != number, number, held)
        code = fp8_code(held, 3 if KIND == 1 else 2, 7 if KIND == 1 else 15)
    tl.store(cache + target + head[:, None] * HEAD + dim[None, :], code, mask=live)


@triton.jit
def store_bytes_kernel(
    k,
    v,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    slots,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    page_stride,
    k_scale,
    v_scale,
    KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    KIND: tl.constexpr,
):
    """Program t stores k[t], v[t] [K, D] at `slots[t]`. If the slot is negative, nothing is stored.
    `k_scales`, `v_scales` [P, K, S] bfloat16 are for int8; `k_scale`, `v_scale` for float8.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    is_live = slot >= 0
    slot = tl.maximum(slot, 0)
    page, offset = slot // PAGE, slot % PAGE
    target = page * page_stride + offset * (KV_HEADS * HEAD)
    scale_target = page * (page_stride // 2) + offset
    _store(
        k + token * k_stride_t, k_cache, k_scales, k_scale, k_stride_h, target, scale_target,
        is_live, KV_HEADS, HEAD, HEADS_BLOCK, BLOCK, PAGE, KIND,
    )  # fmt: skip
    _store(
        v + token * v_stride_t, v_cache, v_scales, v_scale, v_stride_h, target, scale_target,
        is_live, KV_HEADS, HEAD, HEADS_BLOCK, BLOCK, PAGE, KIND,
    )  # fmt: skip
