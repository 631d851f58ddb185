"""Norms, gated activations and rotations by the C++ kernels, and quantisation of their results to 8
bits.

Each op has the result of `kernels.reference`, except for the order in which a norm sums, which may
change the last digit. The reference computes what the kernels do not support.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum

import torch

from ... import reference
from .build import load_kernels

_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


class _Source(IntEnum):
    """What computes the rows of a call (numbers of quantize.cpp)."""

    ROW = 0
    NORM = 1
    ADD_NORM = 2
    GATED = 3


# Dtypes of a call's result (numbers of quantize.cpp).
_KINDS = {torch.int8: 0, torch.float8_e4m3fn: 1, torch.bfloat16: 2}


class Quantization(ctypes.Structure):
    """`Quantization` of rows.h."""

    _fields_ = [("scale", _POINTER), ("group", _INT)]


class _Quantize(ctypes.Structure):
    _fields_ = [
        *((name, _POINTER) for name in ("x", "residual", "weight", "total", "numbers", "scales")),
        *((name, _LONG) for name in ("x_stride", "residual_stride")),
        ("how", Quantization),
        *((name, _INT) for name in ("source", "kind", "tokens", "columns")),
        ("eps", _FLOAT),
    ]


class _NormRotary(ctypes.Structure):
    _fields_ = [
        *((name, _POINTER) for name in ("q", "k", "q_weight", "k_weight", "cos", "signed_sin")),
        *(("out", _POINTER), ("q_stride", _LONG), ("k_stride", _LONG)),
        *((name, _INT) for name in ("tokens", "heads", "kv_heads", "size")),
        ("eps", _FLOAT),
    ]


def _rows(
    source: _Source,
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    scale: torch.Tensor | None = None,
    group: int = 0,
    weight: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    eps: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Return rows [T, K] of `dtype`, scales [T, K / group] if the rows have 8 bits and no `scale`
    is given, and x + residual if there is a residual. Return None if the kernels do not support the
    call.
    """
    library = load_kernels()
    columns = x.shape[-1] // (2 if source is _Source.GATED else 1)
    if (
        library is None
        or dtype not in _KINDS
        or not _are_rows(x, *(() if residual is None else (residual,)))
        or (weight is not None and not is_row(weight, columns))
        or (scale is not None and (scale.shape != (1,) or scale.dtype != torch.float32))
        or (dtype != torch.bfloat16 and scale is None and (group <= 0 or columns % group))
    ):
        return None
    tokens = len(x)
    numbers = x.new_empty(tokens, columns, dtype=dtype)
    scales = x.new_empty(tokens, columns // group if group else 0, dtype=torch.float32)
    total = x.new_empty(x.shape if residual is not None else 0)
    call = _Quantize(
        *pointers(x, residual, weight, total, numbers, scales),
        *(x.stride(0), 0 if residual is None else residual.stride(0)),
        Quantization(*pointers(scale), group),
        *(source, _KINDS[dtype], tokens, columns, eps),
    )
    library.piecework_quantize(ctypes.byref(call), torch.get_num_threads())
    return numbers, scales, total


def _are_rows(*tensors: torch.Tensor) -> bool:
    """Return whether the tensors are bfloat16 of one shape [T, K] with contiguous rows of any
    stride.
    """
    return all(
        each.dtype == torch.bfloat16
        and each.dim() == 2
        and each.shape == tensors[0].shape
        and (each.stride(1) == 1 or each.shape[1] == 1)
        for each in tensors
    )


def is_row(tensor: torch.Tensor, size: int) -> bool:
    return tensor.shape == (size,) and tensor.dtype == torch.bfloat16 and tensor.is_contiguous()


def pointers(*tensors: torch.Tensor | None) -> list[int | None]:
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise rows, or the heads of contiguous rows."""
    rows = x if x.dim() == 2 else x.view(-1, x.shape[-1]) if x.is_contiguous() else None
    made = None if rows is None else _rows(_Source.NORM, rows, x.dtype, weight=weight, eps=eps)
    return made[0].view(x.shape) if made else reference.rms_norm(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    made = _rows(_Source.ADD_NORM, x, x.dtype, weight=weight, residual=residual, eps=eps)
    return (made[0], made[2]) if made else reference.add_rms_norm(x, residual, weight, eps)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    made = _rows(_Source.GATED, x, x.dtype)
    return made[0] if made else reference.silu_and_mul(x)


def quantize_static(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    made = _rows(_Source.ROW, x, dtype, scale=scale)
    return made[0] if made else reference.quantize_static(x, scale, dtype)


def quantize_dynamic(
    x: torch.Tensor, group: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    made = _rows(_Source.ROW, x, dtype, group=group)
    return made[:2] if made else reference.quantize_dynamic(x, group, dtype)


def rms_norm_quantize_static(
    x: torch.Tensor, weight: torch.Tensor, eps: float, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    made = _rows(_Source.NORM, x, dtype, scale=scale, weight=weight, eps=eps)
    return made[0] if made else reference.rms_norm_quantize_static(x, weight, eps, scale, dtype)


def rms_norm_quantize_dynamic(
    x: torch.Tensor, weight: torch.Tensor, eps: float, group: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    made = _rows(_Source.NORM, x, dtype, group=group, weight=weight, eps=eps)
    return made[:2] if made else reference.rms_norm_quantize_dynamic(x, weight, eps, group, dtype)


def add_rms_norm_quantize_static(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scale: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    if made := _rows(
        _Source.ADD_NORM, x, dtype, scale=scale, weight=weight, residual=residual, eps=eps
    ):
        return made[0], made[2]
    return reference.add_rms_norm_quantize_static(x, residual, weight, eps, scale, dtype)


def add_rms_norm_quantize_dynamic(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    group: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    made = _rows(_Source.ADD_NORM, x, dtype, group=group, weight=weight, residual=residual, eps=eps)
    return made or reference.add_rms_norm_quantize_dynamic(x, residual, weight, eps, group, dtype)


def silu_and_mul_quantize_static(
    x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    made = _rows(_Source.GATED, x, dtype, scale=scale)
    return made[0] if made else reference.silu_and_mul_quantize_static(x, scale, dtype)


def silu_and_mul_quantize_dynamic(
    x: torch.Tensor, group: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    made = _rows(_Source.GATED, x, dtype, group=group)
    return made[:2] if made else reference.silu_and_mul_quantize_dynamic(x, group, dtype)


def rotary_embedding(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    turned = _rotated(x, None, None, None, 0.0, cos, signed_sin)
    return reference.rotary_embedding(x, cos, signed_sin) if turned is None else turned


def norm_rotary_embedding(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
) -> torch.Tensor:
    turned = _rotated(q, k, q_weight, k_weight, eps, cos, signed_sin)
    if turned is None:
        return reference.norm_rotary_embedding(q, k, q_weight, k_weight, eps, cos, signed_sin)
    return turned


def _rotated(
    q: torch.Tensor,
    k: torch.Tensor | None,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
) -> torch.Tensor | None:
    """Return heads of q, then those of k, normalised if there are weights, and rotated. Return None
    if the kernels do not support the call.
    """
    library = load_kernels()
    if library is None or q.dim() != 3:
        return None
    tokens, heads, size = q.shape
    kv_heads = 0 if k is None else k.shape[1]
    turns = [each.contiguous() for each in (cos, signed_sin)]
    if (
        size % 2
        or not all(each is None or _are_heads(each, tokens, size) for each in (q, k))
        or not all(each is None or is_row(each, size) for each in (q_weight, k_weight))
        or any(each.shape != (tokens, 1, size) or each.dtype != q.dtype for each in turns)
    ):
        return None
    out = q.new_empty(tokens, heads + kv_heads, size)
    call = _NormRotary(
        *pointers(q, k, q_weight, k_weight, *turns, out),
        *(q.stride(0), 0 if k is None else k.stride(0), tokens, heads, kv_heads, size, eps),
    )
    library.piecework_norm_rotary(ctypes.byref(call), torch.get_num_threads())
    return out


def _are_heads(x: torch.Tensor, tokens: int, size: int) -> bool:
    """Return whether x is bfloat16 [T, heads, D] with contiguous tokens of any stride."""
    return (
        x.dtype == torch.bfloat16
        and x.dim() == 3
        and (x.shape[0], x.shape[2]) == (tokens, size)
        and x.stride(2) == 1
        and (x.stride(1) == size or x.shape[1] == 1)
    )
