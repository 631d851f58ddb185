"""A linear layer as a struct for the C++ kernels: its weight, bias, shape and layout."""

from __future__ import annotations

import ctypes
from enum import IntEnum

import torch

from .quantize import Quantization, pointers

INTEGERS = 64  # Added to a layout of blocks: x is rounded to 8 bits in groups (integers.cpp).
_INTEGER_COLUMNS = 32  # Columns of such a group of x.


class Layout(IntEnum):
    """`Format` of linear.h: the layouts that are not blocks of GGUF files (`gguf_formats`), and
    NVFP4. The numbers of blocks are between BF16 and MIXED.
    """

    BF16 = 0
    NVFP4 = 40
    MIXED = 58
    INT8 = 59
    FP8 = 60
    FP8_BLOCKS = 61
    ROWS = 62


class LinearStruct(ctypes.Structure):
    """`Linear` of linear.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
        *((name, ctypes.c_int32) for name in ("rows", "columns", "layout")),
        ("input", Quantization),
        ("order", ctypes.c_void_p),
        ("adapters", ctypes.c_void_p),
    ]


def linear_struct(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    columns: int,
    rows: int,
    layout: int,
    input_scale: torch.Tensor | None = None,
    input_group: int = 0,
    input_order: torch.Tensor | None = None,
    adapters: int | None = None,
) -> LinearStruct:
    """Return a struct that points into the tensors, which must outlive it.

    Only `NativeStep` reads the last four arguments. `input_group`: if x is to be quantised, the
    number of columns with a scale, unless all have `input_scale` [1]. `input_order` [columns]
    int64: the column of x by which each column of the weight is multiplied. `adapters`: the address
    of `lora.AdaptersStruct`.
    """
    bias_pointer, scale_pointer, order = pointers(bias, input_scale, input_order)
    how = Quantization(scale_pointer, _INTEGER_COLUMNS if layout & INTEGERS else input_group)
    where = weight.data_ptr(), bias_pointer
    return LinearStruct(*where, rows, columns, layout & ~INTEGERS, how, order, adapters)
