"""Linear layers by the C++ kernels on weights packed in panels (weights.h): `piecework::linear`,
and `piecework::native_scaled_linear` for quantised activations.
"""

from __future__ import annotations

import ctypes
import logging
import subprocess
from collections.abc import Sequence
from itertools import chain
from math import prod
from typing import NamedTuple

import torch

from ...fused_collectives import add_product
from ..machine.huge_pages import Slabs
from .build import Kernels, load_kernels
from .embedding import OP as EMBEDDING_OP
from .gguf_formats import gguf_formats
from .linear_struct import INTEGERS, Layout, linear_struct
from .moe import OP as EXPERTS_OP
from .runs import MOST_RUNS, PanelRun, offsets_of, runs_of

logger = logging.getLogger(__name__)

PANEL = 32  # Rows of a weight that are interleaved.


class _Numbers(NamedTuple):
    """A kind of weight that is not GGUF blocks."""

    layout: Layout
    dtype: torch.dtype


_NUMBERS = {
    "bfloat16": _Numbers(Layout.BF16, torch.bfloat16),
    "int8": _Numbers(Layout.INT8, torch.int8),
    "fp8_e4m3": _Numbers(Layout.FP8, torch.float8_e4m3fn),
    "fp8_e4m3_blocks": _Numbers(Layout.FP8_BLOCKS, torch.float8_e4m3fn),
}
SCALED_COLUMNS = 128  # Columns that share a scale, in x and in layouts with several scales per row.


def layout_name(layout: int) -> str:
    """Return a layout's name for output."""
    library = load_kernels()
    assert library is not None
    number = layout & ~INTEGERS
    blocks = {block.layout: name for name, block in gguf_formats(library).items()}
    name = blocks.get(number) or Layout(number).name
    return f"{name} by INT8" if layout & INTEGERS else name


def _row_scales(layout: int, columns: int) -> int:
    """Return the number of scales per row. Scales of GGUF's formats are parts of their blocks, but
    for the tensor's scale of NVFP4.
    """
    if layout == Layout.FP8_BLOCKS:
        return -(-columns // SCALED_COLUMNS)
    return int(layout in (Layout.INT8, Layout.FP8, Layout.NVFP4))


_LIBRARY = torch.library.Library("piecework", "FRAGMENT")  # type: ignore[no-untyped-call]
_LINEAR = "(Tensor x, Tensor weight, Tensor? bias, int out_features, int layout) -> Tensor"
_SCALED_LINEAR = _LINEAR.replace("Tensor x,", "Tensor x, Tensor x_scale,")
_LIBRARY.define("linear" + _LINEAR)  # type: ignore[no-untyped-call]
_LIBRARY.define("native_scaled_linear" + _SCALED_LINEAR)  # type: ignore[no-untyped-call]


def multiply(
    library: ctypes.CDLL,
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_features: int,
    layout: int,
) -> torch.Tensor:
    """Multiply x [T, in]: [T, out_features] bfloat16.

    x is bfloat16, or quantised like the weight with x_scale [1], [T, 1] or [T, in / 128] float32.
    """
    tokens, columns = x.shape
    assert weight.dtype == torch.uint8 and weight.is_contiguous()
    is_mixed = layout & ~INTEGERS == Layout.MIXED
    assert is_mixed or weight.shape == _packed_shape(library, layout, columns, out_features)
    assert bias is None or (bias.shape == (out_features,) and bias.dtype == torch.bfloat16)
    groups = 0
    if x_scale is None:
        assert x.dtype == torch.bfloat16 and layout != Layout.INT8
    else:
        assert x.dtype == (torch.int8 if layout == Layout.INT8 else torch.float8_e4m3fn)
        assert layout >= Layout.INT8 and x_scale.dtype == torch.float32
        if x_scale.dim() == 2:
            x_scale, groups = x_scale.contiguous(), x_scale.shape[1]
            assert x_scale.shape[0] == tokens and columns == groups * (
                columns if groups == 1 else SCALED_COLUMNS
            )
        else:
            assert x_scale.shape == (1,)
    x = x if x.stride(1) == 1 else x.contiguous()
    out = x.new_empty(tokens, out_features, dtype=torch.bfloat16)
    library.piecework_linear(
        ctypes.byref(linear_struct(weight, bias, columns, out_features, layout)),
        ctypes.c_void_p(x.data_ptr()),
        ctypes.c_int64(x.stride(0)),
        None if x_scale is None else ctypes.c_void_p(x_scale.data_ptr()),
        groups,
        ctypes.c_void_p(out.data_ptr()),
        tokens,
        torch.get_num_threads(),
    )
    return out


def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_features: int, layout: int
) -> torch.Tensor:
    library = load_kernels()
    assert library is not None
    return multiply(library, x, None, weight, bias, out_features, layout)


def _scaled_linear(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_features: int,
    layout: int,
) -> torch.Tensor:
    library = load_kernels()
    assert library is not None
    return multiply(library, x, x_scale, weight, bias, out_features, layout)


_LIBRARY.impl("linear", _linear, "CPU")  # type: ignore[no-untyped-call]
_LIBRARY.impl(
    "linear",
    lambda x, weight, bias, out_features, layout: x.new_empty(x.shape[0], out_features),
    "Meta",
)  # type: ignore[no-untyped-call]
_LIBRARY.impl("native_scaled_linear", _scaled_linear, "CPU")  # type: ignore[no-untyped-call]
_LIBRARY.impl(
    "native_scaled_linear",
    lambda x, x_scale, weight, bias, out_features, layout: x.new_empty(
        x.shape[0], out_features, dtype=torch.bfloat16
    ),
    "Meta",
)  # type: ignore[no-untyped-call]


add_product(torch.ops.piecework.linear.default, "native_linear", _LINEAR)
add_product(
    torch.ops.piecework.native_scaled_linear.default,
    "native_scaled_linear",
    _SCALED_LINEAR,
    scaled=True,
)


class NativeLinear:
    """`LinearKernels` of the CPU."""

    op = torch.ops.piecework.linear.default
    scaled_op = torch.ops.piecework.native_scaled_linear.default

    def __init__(
        self, library: Kernels, *, packs_numbers: bool = True, activations: str = "bf16"
    ) -> None:
        """`packs_numbers`: whether to pack weights that are not quantised. `activations`: see
        `Platform.linear_kernels`.
        """
        self._library, self._packs_numbers = library, packs_numbers
        self._blocks = gguf_formats(library)
        self._activations, self._memory = activations, Slabs()

    @property
    def embedding_op(self) -> torch._ops.OpOverload:
        return EMBEDDING_OP

    @property
    def experts_op(self) -> torch._ops.OpOverload:
        return EXPERTS_OP

    @property
    def keeps_blocks(self) -> bool:
        # On processors with matrix units other kernels multiply numbers.
        return self._packs_numbers

    def experts(self, sizes: Sequence[int]) -> NativeLinear | None:
        return self if all(size % PANEL == 0 for size in sizes) else None

    def layout(self, kind: str, in_features: int) -> int | None:
        if runs := runs_of(kind):
            layouts = [self.layout(each, in_features) for each, _ in runs]
            are_whole = all(rows % PANEL == 0 for _, rows in runs[:-1])
            if None in layouts or not are_whole or len(runs) > MOST_RUNS:
                return None
            takes_integers = all(each and each & INTEGERS for each in layouts)
            return Layout.MIXED | INTEGERS if takes_integers else Layout.MIXED
        if block := self._blocks.get(kind):
            if in_features % block.columns or not self._has(kind):
                return None
            layout = block.layout
            return layout | INTEGERS if self._takes_integers(layout) else layout
        if kind not in _NUMBERS or (kind == "bfloat16" and not self._packs_numbers):
            return None
        return _NUMBERS[kind].layout

    def _has(self, kind: str) -> bool:
        """Return whether there are kernels for a block format. They are compiled if needed."""
        try:
            self._library.need(kind)
        except (OSError, subprocess.SubprocessError) as error:
            logger.warning("the CPU kernels lack %s, whose weights are unpacked: %s", kind, error)
            return False
        return True

    def _takes_integers(self, layout: int) -> bool:
        return self._activations == "int8" or (
            self._activations == "auto" and self._library.piecework_prefers_integers(layout) > 0
        )

    def _layout_of(self, kind: str) -> int:
        if (block := self._blocks.get(kind)) is None:
            return _NUMBERS[kind].layout
        self._library.need(kind)
        return block.layout

    def packed_shape(self, kind: str, in_features: int, out_features: int) -> tuple[int, int]:
        if runs := runs_of(kind):
            return 1, offsets_of(self._sizes(runs, in_features))[-1]
        return _packed_shape(self._library, self._layout_of(kind), in_features, out_features)

    def pack(
        self, kind: str, parts: Sequence[torch.Tensor], scales: Sequence[torch.Tensor] = ()
    ) -> torch.Tensor:
        if runs := runs_of(kind):
            return self._pack_runs(runs, parts, scales)
        rows = sum(len(part) for part in parts)
        packed = self._memory.empty(self.packed_shape(kind, self._columns(kind, parts[0]), rows))
        self._pack(kind, parts, scales, packed)
        return packed

    def _pack_runs(
        self,
        runs: Sequence[tuple[str, int]],
        parts: Sequence[torch.Tensor],
        scales: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        columns, begin = self._columns(runs[0][0], parts[0]), 0
        *offsets, size = offsets_of(self._sizes(runs, columns))
        packed = self._memory.empty((1, size)).zero_()
        header = (PanelRun * MOST_RUNS).from_address(packed.data_ptr())
        for number, ((kind, rows), offset) in enumerate(zip(runs, offsets, strict=True)):
            layout = self._layout_of(kind)
            header[number] = PanelRun(-(-rows // PANEL), layout, offset)
            end, left = begin, rows
            while left > 0:
                left -= len(parts[end])
                end += 1
            factors = scales[begin:end] if _row_scales(layout, columns) else ()
            self._pack(kind, parts[begin:end], factors, packed[0, offset:])
            begin = end
        return packed

    def _pack(
        self,
        kind: str,
        parts: Sequence[torch.Tensor],
        scales: Sequence[torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        layout = self._layout_of(kind)
        dtype = torch.uint8 if kind in self._blocks else _NUMBERS[kind].dtype
        parts = [part.contiguous() for part in parts]
        assert all(part.dtype == dtype and part.shape[1:] == parts[0].shape[1:] for part in parts)
        columns = self._columns(kind, parts[0])
        rows = list(chain.from_iterable(_row_addresses(part) for part in parts))
        addresses = torch.tensor(rows, dtype=torch.int64)
        shape = len(rows), _row_scales(layout, columns)
        each = torch.cat([*scales]).float().contiguous() if scales else torch.ones(shape)
        assert each.shape == shape
        self._library.piecework_pack(
            layout,
            ctypes.c_void_p(addresses.data_ptr()),
            len(rows),
            columns,
            ctypes.c_void_p(each.data_ptr()),
            ctypes.c_void_p(out.data_ptr()),
            torch.get_num_threads(),
        )

    def _sizes(self, runs: Sequence[tuple[str, int]], columns: int) -> list[int]:
        """Return the bytes of each run."""
        return [prod(self.packed_shape(kind, columns, rows)) for kind, rows in runs]

    def _columns(self, kind: str, part: torch.Tensor) -> int:
        """Return the number of columns of a stored weight."""
        block = self._blocks.get(kind)
        return part.shape[1] // block.size * block.columns if block else part.shape[1]


def _packed_shape(
    library: ctypes.CDLL, layout: int, in_features: int, out_features: int
) -> tuple[int, int]:
    size = library.piecework_panel_bytes(layout & ~INTEGERS, in_features)
    return -(-out_features // PANEL), size


def _row_addresses(part: torch.Tensor) -> range:
    step = part.shape[1] * part.element_size()
    return range(part.data_ptr(), part.data_ptr() + part.shape[0] * step, step)


def native_linear(*, packs_numbers: bool = True, activations: str = "bf16") -> NativeLinear | None:
    """Return the kernels, or None if they cannot be built."""
    if (library := load_kernels()) is None:
        return None
    return NativeLinear(library, packs_numbers=packs_numbers, activations=activations)
