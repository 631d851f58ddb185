"""Rows of an embedding that is packed in panels (weights.h): `piecework::native_embedding`."""

from __future__ import annotations

import ctypes

import torch

from .build import load_kernels
from .linear_struct import linear_struct

_LIBRARY = torch.library.Library("piecework", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "native_embedding(Tensor ids, Tensor weight, int columns, int rows, int layout) -> Tensor"
)  # type: ignore[no-untyped-call]


def _embedding(
    ids: torch.Tensor, weight: torch.Tensor, columns: int, rows: int, layout: int
) -> torch.Tensor:
    library = load_kernels()
    assert library is not None
    return look_up(library, ids, weight, columns, rows, layout)


def look_up(
    library: ctypes.CDLL,
    ids: torch.Tensor,
    weight: torch.Tensor,
    columns: int,
    rows: int,
    layout: int,
) -> torch.Tensor:
    """Return the rows ids [T] int64 as [T, columns] bfloat16. Raise `IndexError` for a row that
    does not exist.
    """
    assert weight.dtype == torch.uint8 and weight.is_contiguous()
    ids = ids.to(torch.int64).contiguous()
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < rows:
        raise IndexError(f"an id is not below the {rows} rows of the embedding")
    out = torch.empty(ids.shape[0], columns, dtype=torch.bfloat16)
    library.piecework_embedding(
        ctypes.byref(linear_struct(weight, None, columns, rows, layout)),
        ctypes.c_void_p(ids.data_ptr()),
        ids.shape[0],
        ctypes.c_void_p(out.data_ptr()),
        torch.get_num_threads(),
    )
    return out


_LIBRARY.impl("native_embedding", _embedding, "CPU")  # type: ignore[no-untyped-call]
_LIBRARY.impl(
    "native_embedding",
    lambda ids, weight, columns, rows, layout: ids.new_empty(
        ids.shape[0], columns, dtype=torch.bfloat16
    ),
    "Meta",
)  # type: ignore[no-untyped-call]

OP: torch._ops.OpOverload = torch.ops.piecework.native_embedding.default
