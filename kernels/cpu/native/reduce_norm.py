"""The sum of every rank's rows, the residual and the norm in one pass over shared memory
(reduce_norm.cpp). Sums are those of the group, norms those of the native kernels.
"""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

import torch

from .quantize import Quantization, is_row, pointers

# With more than two ranks and more bytes than this, it is faster if each rank first sums a part.
_MOST_BYTES = 1 << 15
_RESULTS = {torch.bfloat16: 0, torch.int8: 1, torch.float8_e4m3fn: 2}


class _ReduceNorm(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("x", "residual", "weight", "total", "out", "scales")
        ),
        ("how", Quantization),
        *((name, ctypes.c_int32) for name in ("result", "tokens", "columns")),
        ("eps", ctypes.c_float),
    ]


class _Group(Protocol):
    """The members of `shared.SharedMemoryGroup` that the kernel needs."""

    library: ctypes.CDLL
    member: ctypes.c_void_p
    size: int

    @property
    def slot_bytes(self) -> int: ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor: ...

    def check(self, succeeded: int) -> None: ...


def all_reduce_norm(
    group: _Group, norm: str, x: torch.Tensor, residual: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, ...] | None:
    """See `fused_collectives.FusesNorms`. Supports bfloat16."""
    weight, eps, *how = rest
    if norm.endswith("fp4"):
        return None
    dtype = how[1] if how else torch.bfloat16
    scale = how[0] if norm.endswith("static") else None
    per_scale = how[0] if norm.endswith("dynamic") else 0
    columns = x.shape[-1]
    if (
        not all(each.dtype == torch.bfloat16 and each.is_contiguous() for each in (x, residual))
        or x.shape != residual.shape
        or dtype not in _RESULTS
        or not is_row(weight, columns)
        or (scale is not None and (scale.shape != (1,) or scale.dtype != torch.float32))
        or (norm.endswith("dynamic") and (per_scale <= 0 or columns % per_scale))
        or not 0 < columns * x.element_size() <= group.slot_bytes
    ):
        return None
    at_once = group.size == 2 or x.nbytes <= _MOST_BYTES
    if not at_once:
        x = group.all_reduce(x)
    out, total = x.new_empty(x.shape, dtype=dtype), torch.empty_like(x)
    scales = x.new_empty(
        *x.shape[:-1], columns // per_scale if per_scale else 0, dtype=torch.float32
    )
    call = _ReduceNorm(
        *pointers(x, residual, weight, total, out, scales),
        Quantization(*pointers(scale), per_scale),
        *(_RESULTS[dtype], x.numel() // columns, columns, eps),
    )
    group.check(
        group.library.piecework_all_reduce_norm(
            group.member if at_once else None, ctypes.byref(call), torch.get_num_threads()
        )
    )
    return (out, scales, total) if per_scale else (out, total)
