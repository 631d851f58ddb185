"""Weights of 4 and 8 bits on Ascend NPUs, multiplied by 16-bit activations by
`npu_weight_quant_batchmatmul`, and their packed layout.
"""

# mypy: disable-error-code="attr-defined"
# torch.npu exists after the import of torch_npu.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .refusals import or_else

_LONGEST = 65535  # Most rows and columns of the kernel.
_ROWS_AT_ONCE = 1 << 15  # Rows per product of a weight with more rows than that, such as a head.
_ROW_UNIT, _GROUP_UNIT = 8, 32
# Bytes of each row whose 4-bit numbers are widened to 32 bits at once, for packing.
_BYTES_AT_ONCE = 1024
_ALIGNMENT = 512

_LIBRARY = torch.library.Library("piecework", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "npu_weight_only_linear(Tensor x, Tensor weight, Tensor? bias, int out_features, int layout) "
    "-> Tensor"
)  # type: ignore[no-untyped-call]


class Layout(NamedTuple):
    """The layout of weights of `bits` with a scale per `group` columns and, if not symmetric, an
    offset.

    A packed weight consists of blocks of up to 32,768 rows R. Each block has the transposed weight,
    [K, R] int8 or [K, R / 8] int32 of eight numbers, then scales and offsets [K / group, R] in the
    model's dtype. Each of the three begins at a multiple of 512 bytes. A value is (number + offset)
    * scale.
    """

    bits: int
    group: int
    is_symmetric: bool

    @classmethod
    def of_number(cls, number: int) -> Layout:
        return cls(number % 16, number // 32, bool(number // 16 % 2))

    @property
    def number(self) -> int:
        return self.bits + 16 * self.is_symmetric + 32 * self.group

    def sections(self, rows: int, columns: int) -> list[int]:
        """Return the bytes of a block's weight, scales and offsets."""
        scales = columns // self.group * rows * 2
        sizes = [columns * rows * self.bits // 8, scales, 0 if self.is_symmetric else scales]
        return [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]

    def blocks(
        self, packed: torch.Tensor, dtype: torch.dtype, rows: int, columns: int
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        """Yield the rows of each block, and views of its weight, scales and offsets."""
        rest = packed.flatten()
        for begin in range(0, rows, _ROWS_AT_ONCE):
            wanted = min(_ROWS_AT_ONCE, rows - begin)
            width = _padded(wanted)
            sizes = self.sections(width, columns)
            weight, scales, offsets, rest = torch.split(rest, [*sizes, len(rest) - sum(sizes)])
            kind, per_row = (torch.int8, width) if self.bits == 8 else (torch.int32, width // 8)
            groups = columns // self.group
            yield (
                wanted,
                weight.view(kind)[: columns * per_row].view(columns, per_row),
                scales.view(dtype)[: groups * width].view(groups, width),
                None
                if self.is_symmetric
                else offsets.view(dtype)[: groups * width].view(groups, width),
            )


class WeightOnlyKernels:
    """`LinearKernels` for weights of the kind "weight_only BITS COLUMNS ZEROS"."""

    op = torch.ops.piecework.npu_weight_only_linear.default
    scaled_op = None
    experts_op = None
    embedding_op = None

    def __init__(self, dtype: torch.dtype) -> None:
        """`dtype` is that of activations, bfloat16 or float16."""
        self._dtype = dtype

    keeps_blocks = False

    def experts(self, sizes: Sequence[int]) -> None:
        return None

    def layout(self, kind: str, in_features: int) -> int | None:
        match kind.split():
            case ["weight_only", bits, columns, zeros]:
                group = int(columns)
                fits = group == in_features or group % _GROUP_UNIT == 0
                if fits and in_features <= _LONGEST:
                    return Layout(int(bits), group, zeros == "symmetric").number
        return None

    def packed_shape(self, kind: str, in_features: int, out_features: int) -> tuple[int, int]:
        widths = (
            _padded(min(_ROWS_AT_ONCE, out_features - begin))
            for begin in range(0, out_features, _ROWS_AT_ONCE)
        )
        layout = self.layout(kind, in_features)
        assert layout is not None
        found = Layout.of_number(layout)
        return 1, sum(sum(found.sections(width, in_features)) for width in widths)

    def pack(
        self, kind: str, parts: Sequence[torch.Tensor], scales: Sequence[torch.Tensor] = ()
    ) -> torch.Tensor:
        device = torch.device("npu", torch.npu.current_device())
        bits = int(kind.split()[1])
        numbers, grouped = torch.cat(tuple(parts)), torch.cat(tuple(scales))
        is_symmetric = kind.endswith(" symmetric")
        packed = []
        for begin in range(0, len(numbers), _ROWS_AT_ONCE):
            block = slice(begin, begin + _ROWS_AT_ONCE)
            rows, pairs = numbers[block].to(device), grouped[block].to(device)
            fill = _padded(len(rows)) - len(rows)
            rows, pairs = F.pad(rows, (0, 0, 0, fill)), F.pad(pairs, (0, 0, 0, 0, 0, fill))
            scale, zero = pairs.to(torch.float32).unbind(-1)
            weight = (rows ^ 128).view(torch.int8).t().contiguous() if bits == 8 else _int4(rows)
            offset = (1 << bits - 1) - zero
            sections = [weight, scale.t(), *([] if is_symmetric else [offset.t()])]
            for section in sections:
                values = section if section is weight else section.to(self._dtype)
                flat = values.contiguous().view(-1).view(torch.uint8)
                packed.append(F.pad(flat, (0, -len(flat) % _ALIGNMENT)))
        return torch.cat(packed)[None]


def _padded(rows: int) -> int:
    """Round up to whole groups of eight rows, by which 4-bit numbers are packed."""
    return -(-rows // _ROW_UNIT) * _ROW_UNIT


def _int4(rows: torch.Tensor) -> torch.Tensor:
    """Pack rows [R, K / 2] uint8, with the earlier column in the low half, into [K, R /
    8] int32.
    """
    packed = []
    for some in torch.split(rows, _BYTES_AT_ONCE, dim=1):
        numbers = torch.stack((some & 15, some >> 4), dim=-1).flatten(1).t().int() - 8
        packed.append(torch.ops.npu.npu_convert_weight_to_int4pack(numbers.contiguous()))
    return torch.cat(packed)


def _plain(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_features: int, layout: int
) -> torch.Tensor:
    found, columns, results = Layout.of_number(layout), x.shape[1], []
    for rows, numbers, scale, offset in found.blocks(weight, x.dtype, out_features, columns):
        if found.bits == 4:
            shifts = 4 * torch.arange(8, dtype=torch.int32, device=x.device)
            halves = (numbers.unsqueeze(-1) >> shifts).flatten(1) & 15
            numbers = torch.where(halves > 7, halves - 16, halves)
        wide = numbers.float().view(-1, found.group, numbers.shape[1])
        if offset is not None:
            wide = wide + offset.float()[:, None]
        wide = (wide * scale.float()[:, None]).flatten(0, 1).to(x.dtype)
        results.append((x @ wide)[:, :rows])
    result = torch.cat(results, dim=1)
    return result if bias is None else result + bias


@or_else(_plain)
def npu_weight_only_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_features: int, layout: int
) -> torch.Tensor | None:
    """Multiply x [T, K], in the dtype that the weight was packed for: [T, out_features]."""
    if x.numel() == 0:
        return None
    found, columns, results, begin = Layout.of_number(layout), x.shape[1], [], 0
    if bias is not None and x.dtype == torch.bfloat16:
        bias = bias.float()
    for rows, numbers, scale, offset in found.blocks(weight, x.dtype, out_features, columns):
        width = scale.shape[1]
        part = None if bias is None else bias[begin : begin + rows]
        if part is not None and rows < width:
            part = F.pad(part, (0, width - rows))
        result: torch.Tensor = torch.ops.npu.npu_weight_quant_batchmatmul(
            x,
            numbers,
            scale,
            antiquant_offset=offset,
            bias=part,
            antiquant_group_size=0 if found.group == columns else found.group,
        )
        results.append(result[:, :rows])
        begin += rows
    return results[0].contiguous() if len(results) == 1 else torch.cat(results, dim=1)


_LIBRARY.impl("npu_weight_only_linear", npu_weight_only_linear, "PrivateUse1")  # type: ignore[no-untyped-call]
_LIBRARY.impl(
    "npu_weight_only_linear",
    lambda x, weight, bias, out_features, layout: x.new_empty(x.shape[0], out_features),
    "Meta",
)  # type: ignore[no-untyped-call]
