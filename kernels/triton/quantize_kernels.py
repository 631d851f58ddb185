"""Triton kernels that write 8-bit numbers: quantisation alone, and after a norm or a gated
activation, in one pass over memory.

They round where `kernels.reference` rounds. FP8 is made from float32 by integer arithmetic, so that
GPUs without FP8 can write it too. e4m3 and e5m2 are laid out as in arXiv:2209.05433.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .op_kernels import gated, normalised

_LEAST_SCALED = tl.constexpr(1e-10)
# 1.5 * 2^23: adding it to a float32 below 2^22 rounds to a whole number.
_HALVES_TO_EVEN = tl.constexpr(12582912.0)


@triton.jit
def fp8_code(number, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Return the bits of float32 `number` in an 8-bit format, rounded to the nearest,
    ties to even.
    """
    SHIFT: tl.constexpr = 23 - MANTISSA
    EXPONENT: tl.constexpr = 24 - BIAS - MANTISSA
    signed = number.to(tl.int32, bitcast=True)
    bits = signed & 0x7FFFFFFF
    rounded = bits + ((1 << (SHIFT - 1)) - 1) + ((bits >> SHIFT) & 1)
    code = (rounded >> SHIFT) - ((127 - BIAS) << MANTISSA)
    # The last digit of 2^EXPONENT is the distance of two subnormal numbers.
    magnitude = bits.to(tl.float32, bitcast=True)
    shifted = (magnitude + (1 << EXPONENT)).to(tl.int32, bitcast=True)
    code = tl.where(bits < ((128 - BIAS) << 23), shifted - ((127 + EXPONENT) << 23), code)
    code = tl.where(magnitude != magnitude, 0x7F, code)
    return (code | ((signed >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def quantized(value, divisor, LARGEST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Return value / divisor, both float32 of one shape, as int8 (MANTISSA 0) or the bits
    of FP8.
    """
    number = tl.div_rn(value, divisor)
    kept = tl.minimum(tl.maximum(number, -LARGEST), LARGEST)
    if MANTISSA == 0:
        code = ((kept + _HALVES_TO_EVEN) - _HALVES_TO_EVEN).to(tl.int8)
    else:
        code = fp8_code(tl.where(number != number, number, kept), MANTISSA, BIAS)
    return code


@triton.jit
def _store_quantized(
    value,
    out,
    scale,
    first,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    DYNAMIC: tl.constexpr,
    LARGEST: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Quantise value [BLOCK] float32, 0 beyond SIZE, and store it in the row `out` from column
    `first` on.

    With DYNAMIC, the scales of the row's groups are stored at `scale`. Without, `scale` holds the
    scale. MANTISSA 0: int8.
    """
    column = first + tl.arange(0, BLOCK)
    if DYNAMIC:
        groups = tl.reshape(value, (BLOCK // GROUP, GROUP))
        # tl.max drops NaN, but a row with NaN must become NaN.
        largest = tl.max(tl.where(groups != groups, float("inf"), tl.abs(groups)), 1)
        each = tl.div_rn(tl.maximum(largest, _LEAST_SCALED), LARGEST)
        place = first // GROUP + tl.arange(0, BLOCK // GROUP)
        tl.store(scale + place, each, mask=place * GROUP < SIZE)
        divisor = tl.reshape(tl.broadcast_to(each[:, None], (BLOCK // GROUP, GROUP)), (BLOCK,))
    else:
        divisor = tl.load(scale) + tl.zeros((BLOCK,), tl.float32)
    code = quantized(value, divisor, LARGEST, MANTISSA, BIAS)
    tl.store(out + column, code, mask=column < SIZE)


@triton.jit
def quantize_kernel(
    x,
    out,
    scale,
    x_stride,
    scale_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    DYNAMIC: tl.constexpr,
    LARGEST: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Program (t, block): BLOCK columns of row t. `out` is contiguous."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    column = first + tl.arange(0, BLOCK)
    value = tl.load(x + row * x_stride + column, mask=column < SIZE, other=0.0).to(tl.float32)
    _store_quantized(
        value, out + row * SIZE, scale + row * scale_stride, first,
        SIZE, BLOCK, GROUP, DYNAMIC, LARGEST, MANTISSA, BIAS,
    )  # fmt: skip


@triton.jit
def rms_norm_quantize_kernel(
    x,
    residual,
    weight,
    out,
    scale,
    total,
    x_stride,
    residual_stride,
    scale_stride,
    eps,
    ADD: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    DYNAMIC: tl.constexpr,
    LARGEST: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Program t: row t of x, normalised, to `out`. With ADD, the residual is added first, and the
    sum goes to `total`. Both are contiguous.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    live = column < SIZE
    value = tl.load(x + row * x_stride + column, mask=live, other=0.0).to(tl.float32)
    if ADD:
        other = tl.load(residual + row * residual_stride + column, mask=live, other=0.0)
        added = (value + other.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + row * SIZE + column, added, mask=live)
        value = added.to(tl.float32)
    result = normalised(value, tl.load(weight + column, mask=live, other=0.0), eps, SIZE)
    _store_quantized(
        result.to(x.dtype.element_ty).to(tl.float32), out + row * SIZE, scale + row * scale_stride,
        0, SIZE, BLOCK, GROUP, DYNAMIC, LARGEST, MANTISSA, BIAS,
    )  # fmt: skip


@triton.jit
def silu_and_mul_quantize_kernel(
    x,
    out,
    scale,
    x_stride,
    scale_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    DYNAMIC: tl.constexpr,
    LARGEST: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Program (t, block): BLOCK columns of row t, [2 * SIZE] in x. `out` is contiguous."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    value = gated(x + row * x_stride, first + tl.arange(0, BLOCK), SIZE)
    _store_quantized(
        value.to(tl.float32), out + row * SIZE, scale + row * scale_stride, first,
        SIZE, BLOCK, GROUP, DYNAMIC, LARGEST, MANTISSA, BIAS,
    )  # fmt: skip
