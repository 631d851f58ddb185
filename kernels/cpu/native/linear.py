"""Linear layers by the C++ kernels: `piecework::linear`, on weights packed in panels
(weights.h).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import IntEnum
from itertools import chain

import torch

from .build import load_kernels

PANEL = 32
"""Rows of a weight that lie side by side."""


class Layout(IntEnum):
    """`Format` of weights.h."""

    BF16 = 0
    Q8 = 1
    Q4 = 2


_GROUPS = {Layout.BF16: (2, 4 * PANEL), Layout.Q8: (32, 34 * PANEL), Layout.Q4: (32, 20 * PANEL)}
"""Columns of a group, and its bytes in a panel."""
_ROW_POWERS_BYTES = 4 * PANEL
"""At the end of a panel."""
_KINDS = {
    "bfloat16": (Layout.BF16, 0),
    "Q8_0": (Layout.Q8, 1),
    "Q4_1": (Layout.Q4, 2),
    "Q4_0": (Layout.Q4, 3),
}
"""Layout, and the number by which `piecework_pack` knows the kind."""


class LinearStruct(ctypes.Structure):
    """`Linear` of linear.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
        *((name, ctypes.c_int32) for name in ("rows", "columns", "layout")),
    ]


def linear_struct(
    weight: torch.Tensor, bias: torch.Tensor | None, columns: int, rows: int, layout: int
) -> LinearStruct:
    """Points into the tensors, which must outlive it."""
    return LinearStruct(
        weight.data_ptr(), None if bias is None else bias.data_ptr(), rows, columns, layout
    )


_LIBRARY = torch.library.Library("piecework", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "linear(Tensor x, Tensor weight, Tensor? bias, int out_features, int layout) -> Tensor"
)  # type: ignore[no-untyped-call]


def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_features: int, layout: int
) -> torch.Tensor:
    library = load_kernels()
    assert library is not None and x.dtype == torch.bfloat16 and x.dim() == 2
    if x.stride(1) != 1:
        x = x.contiguous()
    out = x.new_empty(x.shape[0], out_features)
    struct = linear_struct(weight, bias, x.shape[1], out_features, layout)
    pointers = (
        ctypes.c_void_p(x.data_ptr()),
        ctypes.c_int64(x.stride(0)),
        ctypes.c_void_p(out.data_ptr()),
    )
    library.piecework_linear(ctypes.byref(struct), *pointers, x.shape[0], torch.get_num_threads())
    return out


def _linear_meta(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_features: int, layout: int
) -> torch.Tensor:
    return x.new_empty(x.shape[0], out_features)


_LIBRARY.impl("linear", _linear, "CPU")  # type: ignore[no-untyped-call]
_LIBRARY.impl("linear", _linear_meta, "Meta")  # type: ignore[no-untyped-call]


class NativeLinear:
    """`LinearKernels` of the CPU."""

    op = torch.ops.piecework.linear.default

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def layout(self, kind: str, in_features: int) -> int | None:
        if kind not in _KINDS:
            return None
        layout = _KINDS[kind][0]
        return layout if layout is Layout.BF16 or in_features % _GROUPS[layout][0] == 0 else None

    def packed_shape(self, layout: int, in_features: int, out_features: int) -> tuple[int, int]:
        columns, size = _GROUPS[Layout(layout)]
        return -(-out_features // PANEL), -(-in_features // columns) * size + _ROW_POWERS_BYTES

    def pack(self, kind: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        layout, number = _KINDS[kind]
        parts = [part.contiguous() for part in parts]
        width = parts[0].shape[1]
        columns = width if layout is Layout.BF16 else width // _block_bytes(kind) * 32
        rows = list(chain.from_iterable(_row_addresses(part) for part in parts))
        packed = torch.empty(self.packed_shape(layout, columns, len(rows)), dtype=torch.uint8)
        addresses = torch.tensor(rows, dtype=torch.int64)
        pointers = (
            ctypes.c_void_p(addresses.data_ptr()),
            len(rows),
            columns,
            ctypes.c_void_p(packed.data_ptr()),
        )
        self._library.piecework_pack(number, *pointers, torch.get_num_threads())
        return packed


def _block_bytes(kind: str) -> int:
    """Bytes of 32 numbers, as GGUF holds them."""
    return {"Q8_0": 34, "Q4_1": 20, "Q4_0": 18}[kind]


def _row_addresses(part: torch.Tensor) -> range:
    step = part.shape[1] * part.element_size()
    return range(part.data_ptr(), part.data_ptr() + part.shape[0] * step, step)


def native_linear() -> NativeLinear | None:
    """None where there are no kernels."""
    library = load_kernels()
    return None if library is None else NativeLinear(library)
