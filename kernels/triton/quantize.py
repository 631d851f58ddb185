"""The ops that quantise, alone and after a norm or a gated activation, in Triton. Signatures and
meaning are those of `kernels.reference`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .. import reference
from .quantize_kernels import (
    quantize_kernel,
    rms_norm_quantize_kernel,
    silu_and_mul_quantize_kernel,
)
from .tiles import BLOCK, power_of_2, warps

# Digits of the mantissa, and the bias of the exponent.
BITS = {torch.int8: (0, 0), torch.float8_e4m3fn: (3, 7), torch.float8_e5m2: (2, 15)}


class _Output(NamedTuple):
    """The quantised numbers [T, SIZE] and scales of a launch, and the arguments of its kernel:
    `arguments` are `out`, `scale` and `scale_stride`.
    """

    numbers: torch.Tensor
    scale: torch.Tensor
    arguments: tuple[torch.Tensor, torch.Tensor, int]
    grid: tuple[int, int]
    constants: dict[str, Any]


def _output(
    x: torch.Tensor,
    size: int,
    dtype: torch.dtype,
    scale: torch.Tensor | None = None,
    group: int = 0,
    whole_rows: bool = False,
) -> _Output:
    """Return the output for rows like x's with `size` columns.

    `scale` is the static scale. Without it, each `group` columns get a scale. `whole_rows`: a
    program must see its whole row.
    """
    assert x.dim() == 2 and x.stride(1) == 1
    rows, dynamic = x.shape[0], scale is None
    numbers = torch.empty(rows, size, dtype=dtype, device=x.device)
    if scale is None:
        scale = torch.empty(rows, size // group, dtype=torch.float32, device=x.device)
    block = power_of_2(size)
    if not whole_rows and group < size:
        block = min(block, max(BLOCK, group))
    mantissa, bias = BITS[dtype]
    constants = {
        "SIZE": size,
        "BLOCK": block,
        "GROUP": block if group == size else group,
        "DYNAMIC": dynamic,
        "LARGEST": reference.LARGEST[dtype],
        "MANTISSA": mantissa,
        "BIAS": bias,
        "num_warps": warps(block),
    }
    # Triton does not know e4m3 on GPUs without it.
    out = numbers if dtype == torch.int8 else numbers.view(torch.uint8)
    return _Output(
        numbers,
        scale,
        (out, scale, scale.stride(0) if dynamic else 0),
        (rows, -(-size // block)),
        constants,
    )


def _has_kernel(group: int, size: int) -> bool:
    """Return whether the groups of a row fit a tile: a group is the whole row, or a power
    of two.
    """
    return group == size or power_of_2(group) == group


def quantize_static(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Quantise x [T, K], rows of any stride, by scale [1] float32."""
    made = _output(x, x.shape[1], dtype, scale)
    _quantize(x, made)
    return made.numbers


def quantize_dynamic(
    x: torch.Tensor, group: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise x [T, K], rows of any stride."""
    if not _has_kernel(group, x.shape[1]):
        return reference.quantize_dynamic(x, group, dtype)
    made = _output(x, x.shape[1], dtype, group=group)
    _quantize(x, made)
    return made.numbers, made.scale


def _quantize(x: torch.Tensor, made: _Output) -> None:
    if made.numbers.numel():
        out, scale, scale_stride = made.arguments
        quantize_kernel[made.grid](x, out, scale, x.stride(0), scale_stride, **made.constants)


def rms_norm_quantize_static(
    x: torch.Tensor, weight: torch.Tensor, eps: float, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Normalise and quantise x [T, H]."""
    made = _output(x, x.shape[1], dtype, scale, whole_rows=True)
    _normalise(x, None, weight, eps, made)
    return made.numbers


def rms_norm_quantize_dynamic(
    x: torch.Tensor, weight: torch.Tensor, eps: float, group: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise and quantise x [T, H]."""
    if not _has_kernel(group, x.shape[1]):
        return reference.rms_norm_quantize_dynamic(x, weight, eps, group, dtype)
    made = _output(x, x.shape[1], dtype, group=group, whole_rows=True)
    _normalise(x, None, weight, eps, made)
    return made.numbers, made.scale


def add_rms_norm_quantize_static(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scale: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add, normalise and quantise x, residual [T, H]."""
    made = _output(x, x.shape[1], dtype, scale, whole_rows=True)
    return made.numbers, _normalise(x, residual, weight, eps, made)


def add_rms_norm_quantize_dynamic(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    group: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Add, normalise and quantise x, residual [T, H]."""
    if not _has_kernel(group, x.shape[1]):
        return reference.add_rms_norm_quantize_dynamic(x, residual, weight, eps, group, dtype)
    made = _output(x, x.shape[1], dtype, group=group, whole_rows=True)
    return made.numbers, made.scale, _normalise(x, residual, weight, eps, made)


def _normalise(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    made: _Output,
) -> torch.Tensor:
    """Return x + residual, or x if there is no residual."""
    total = x if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    other = x if residual is None else residual
    assert other.stride(1) == 1
    if made.numbers.numel():
        out, scale, scale_stride = made.arguments
        rms_norm_quantize_kernel[made.grid](
            x,
            other,
            weight,
            out,
            scale,
            total,
            x.stride(0),
            other.stride(0),
            scale_stride,
            eps,
            ADD=residual is not None,
            **made.constants,
        )
    return total


def silu_and_mul_quantize_static(
    x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Compute silu and mul of x [T, 2 * I], and quantise."""
    made = _output(x, x.shape[1] // 2, dtype, scale)
    _silu_and_mul(x, made)
    return made.numbers


def silu_and_mul_quantize_dynamic(
    x: torch.Tensor, group: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute silu and mul of x [T, 2 * I], and quantise."""
    if not _has_kernel(group, x.shape[1] // 2):
        return reference.silu_and_mul_quantize_dynamic(x, group, dtype)
    made = _output(x, x.shape[1] // 2, dtype, group=group)
    _silu_and_mul(x, made)
    return made.numbers, made.scale


def _silu_and_mul(x: torch.Tensor, made: _Output) -> None:
    if made.numbers.numel():
        out, scale, scale_stride = made.arguments
        silu_and_mul_quantize_kernel[made.grid](
            x, out, scale, x.stride(0), scale_stride, **made.constants
        )
