"""The updates of adapters (LoRA) by the C++ kernels, as an op and in decode steps."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ... import reference
from ...lora import RANK_STEP
from .build import load_kernels
from .quantize import pointers

PANEL = 32  # Columns of a panel of `b`.
_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


class AdaptersStruct(ctypes.Structure):
    """`Adapters` of lora.h."""

    _fields_ = [
        *((name, _POINTER) for name in ("a", "b", "scales", "ranks", "ends")),
        *((name, _INT) for name in ("parts", "rank", "rows", "columns")),
    ]


class _Call(ctypes.Structure):
    _fields_ = [
        ("adapters", AdaptersStruct),
        *((name, _POINTER) for name in ("y", "x", "slots", "out")),
        *(("y_stride", _LONG), ("x_stride", _LONG), ("tokens", _INT)),
    ]


# The structs of layers, and the ends of their parts, which must stay at their addresses.
_made: WeakKeyDictionary[Any, tuple[AdaptersStruct, Any]] = WeakKeyDictionary()


def adapters_address(adapters: Any) -> int | None:
    """Return the address of a struct of a layer's adapters, which lives as long as these.

    `adapters` has tensors `a`, `b`, `scales` and `ranks`, and `rows`: see `kernels.lora.lora`. None
    has no address.
    """
    if adapters is None:
        return None
    if adapters not in _made:
        ends = _ends(adapters.rows)
        tensors = adapters.a, adapters.b, adapters.scales, adapters.ranks
        _made[adapters] = _struct(*tensors, ends, sum(adapters.rows)), ends
    return ctypes.addressof(_made[adapters][0])


def lora(
    y: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scales: torch.Tensor,
    ranks: torch.Tensor,
    slots: torch.Tensor,
    rows: Sequence[int],
) -> torch.Tensor:
    """See `kernels.lora.lora`. Updates are summed in float32."""
    library = load_kernels()
    fits = a.shape[3] % RANK_STEP == 0 and b.shape[3] == PANEL
    if not (library and fits) or not all(
        each.dtype == torch.bfloat16 and each.stride(-1) == 1 for each in (y, x, a, b)
    ):
        return reference.lora(y, x, a, b, scales, ranks, slots, rows)
    out, ends = y.new_empty(y.shape), _ends(rows)
    call = _Call(
        _struct(a, b, scales, ranks, ends, sum(rows)),
        *pointers(y, x, slots, out),
        *(y.stride(0), x.stride(0), len(x)),
    )
    library.piecework_lora(ctypes.byref(call), torch.get_num_threads())
    return out


def _ends(rows: Sequence[int]) -> Any:
    return (ctypes.c_int32 * len(rows))(*accumulate(rows))


def _struct(
    a: torch.Tensor,
    b: torch.Tensor,
    scales: torch.Tensor,
    ranks: torch.Tensor,
    ends: Any,
    rows: int,
) -> AdaptersStruct:
    _, parts, columns, rank = a.shape
    where = *pointers(a, b, scales, ranks), ctypes.addressof(ends)
    return AdaptersStruct(*where, parts, rank, rows, columns)
