"""Weights in blocks as Triton's kernels keep them: the planes of a row, and how they are made.

A row of K columns is a row of bytes. Its planes begin at multiples of 16 bytes, so that loads are
whole vectors:

- numbers: 4-bit ones in units of 64 columns, of which byte j holds columns j (low) and 32 + j, or a
  byte each;
- high bits: 32 bytes for as many groups of 32 columns as have bits in a byte;
- a byte for the scale of each group, and one for its minimum or zero point;
- scales of `super_size` columns, in float16 or float32, each followed by a minimum if there is one.

Blocks of GGUF: ggml-org/ggml, src/ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

_HALF = torch.float16
_UNIT = 256  # Columns that rows are padded to a multiple of, unless numbers have no high bits.
_ALIGNMENT = 16
_AT_ONCE = 2**26  # Numbers that are unpacked at once.


class Parts(NamedTuple):
    """Unpacked rows R of K columns.

    Attributes:
        numbers: [R, K] uint8.
        scales: [R, n] or, with minima, [R, n, 2], in float16 or float32.
        subs: [R, groups] uint8, the scales of groups.
        minima: [R, groups] uint8, the minima of groups, or zero points of scales.
    """

    numbers: torch.Tensor
    scales: torch.Tensor | None = None
    subs: torch.Tensor | None = None
    minima: torch.Tensor | None = None


# Takes blocks [R, n, bytes] uint8.
Reader = Callable[[torch.Tensor], Parts]


class Planes(NamedTuple):
    """Where the planes of a row begin, the bytes of a row, and its columns with padding."""

    high: int
    subs: int
    minima: int
    scales: int
    row_bytes: int
    columns: int


@dataclass(frozen=True, slots=True)
class Format:
    """A value is (number - offset) * scale - minimum.

    Attributes:
        read: Unpacks blocks of `block` columns and `block_bytes` bytes. None: not from GGUF.
        bits: Bits of the numbers in the first plane, 4 or 8.
        high: More bits of each number.
        number: "integer", or a float: "e2m1" of 4 bits, "e4m3" of 8.
        scale: "half" or "float": that of `super_size` columns. Else a byte for each `group`
            columns: "unsigned" and "signed" multiply a half, "e4m3" a float, "power" is of two.
        minimum: "none"; "half": added, beside the scale; "sub": a byte for each 32 columns times
            the number beside the scale; "zero": a byte that is subtracted from numbers.
        super_size: Columns of a scale. 0: all of the row.
    """

    bits: int
    number: str = "integer"
    scale: str = "half"
    minimum: str = "none"
    offset: int = 0
    high: int = 0
    group: int = 32
    super_size: int = 32
    block: int = 0
    block_bytes: int = 0
    read: Reader | None = None

    def columns_of_scale(self, columns: int) -> int:
        return self.super_size or columns

    def planes(self, columns: int) -> Planes:
        unit = _UNIT if self.high or self.scale in ("unsigned", "signed") else 64
        padded = -(-columns // unit) * unit
        has_subs = self.scale in ("unsigned", "signed", "e4m3", "power")
        scales = -(-padded // self.columns_of_scale(padded))
        each = {"float": 4, "e4m3": 4, "power": 0}.get(self.scale, 2)
        paired = 2 if self.minimum in ("half", "sub") else 1
        minima = {"sub": padded // 32, "zero": scales}.get(self.minimum, 0)
        sizes = [
            padded * self.bits // 8,
            padded * self.high // 8,
            padded // self.group if has_subs else 0,
            minima,
            scales * each * paired,
        ]
        ends, end = [], 0
        for size in sizes:
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
            ends.append(end)
        high, subs, minima_at, scales_at, row_bytes = ends
        return Planes(high, subs, minima_at, scales_at, row_bytes, padded)


def _halves(blocks: torch.Tensor, begin: int, count: int) -> torch.Tensor:
    """Return `count` float16 numbers of each block: [R, n] or [R, n, count]."""
    found = blocks[..., begin : begin + 2 * count].contiguous().view(_HALF)
    return found[..., 0] if count == 1 else found


def _nibbles(stored: torch.Tensor) -> torch.Tensor:
    """Return the low halves of bytes [..., n], then the high halves: [..., 2 n]."""
    return torch.cat((stored & 15, stored >> 4), dim=-1)


def _read_legacy(numbers_at: int, scales: int, fifth_at: int, blocks: torch.Tensor) -> Parts:
    """Blocks of 32 numbers of 4 bits, of 5 if there are fifth bits at `fifth_at`."""
    numbers = _nibbles(blocks[..., numbers_at : numbers_at + 16])
    if fifth_at:
        shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
        fifth = blocks[..., fifth_at : fifth_at + 4, None] >> shifts & 1
        numbers = numbers | fifth.flatten(-2) << 4
    return Parts(numbers.flatten(1), _halves(blocks, 0, scales))


def _read_q8_0(blocks: torch.Tensor) -> Parts:
    return Parts((blocks[..., 2:] ^ 128).flatten(1), _halves(blocks, 0, 1))


def _read_k(numbers_at: int, fifth_at: int, blocks: torch.Tensor) -> Parts:
    """Q4_K and Q5_K: 8 scales and minima of 6 bits in 12 bytes, and eight times 32 numbers."""
    sixes = blocks[..., 4:16]
    low, high, rest = sixes[..., :4], sixes[..., 4:8], sixes[..., 8:]
    subs = torch.cat((low & 63, (rest & 15) | (low >> 6) << 4), dim=-1)
    minima = torch.cat((high & 63, rest >> 4 | (high >> 6) << 4), dim=-1)
    numbers = _nibbles(blocks[..., numbers_at:].unflatten(-1, (4, 32)))  # type: ignore[no-untyped-call]
    if fifth_at:
        shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
        fifth = blocks[..., None, fifth_at : fifth_at + 32] >> shifts & 1
        numbers = numbers | fifth.view(numbers.shape) << 4
    return Parts(numbers.flatten(1), _halves(blocks, 0, 2), subs.flatten(1), minima.flatten(1))


def _read_q6_k(blocks: torch.Tensor) -> Parts:
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64)))  # type: ignore[no-untyped-call]
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts & 3  # type: ignore[no-untyped-call]
    numbers = low | high.view(low.shape) << 4
    subs = blocks[..., 192:208].flatten(1)
    return Parts(numbers.flatten(1), _halves(blocks, 208, 1), subs)


def _read_mxfp4(blocks: torch.Tensor) -> Parts:
    return Parts(_nibbles(blocks[..., 1:]).flatten(1), None, blocks[..., 0])


def _legacy(size: int, scales: int, offset: int, fifth_at: int = 0) -> Format:
    return Format(
        4,
        minimum="half" if scales == 2 else "none",
        offset=offset,
        high=1 if fifth_at else 0,
        block=32,
        block_bytes=size,
        read=partial(_read_legacy, size - 16, scales, fifth_at),
    )


_K = Format(4, scale="unsigned", minimum="sub", super_size=256, block=256)

# By the names of GGUF's formats, and of the kinds of `LinearKernels`. Layouts have the places in
# this list as numbers, so new ones are added at the end.
FORMATS = {
    "Q4_0": _legacy(18, 1, 8),
    "Q4_1": _legacy(20, 2, 0),
    "Q5_0": _legacy(22, 1, 16, fifth_at=2),
    "Q5_1": _legacy(24, 2, 0, fifth_at=4),
    "Q8_0": Format(8, offset=128, block=32, block_bytes=34, read=_read_q8_0),
    "Q4_K": replace(_K, block_bytes=144, read=partial(_read_k, 16, 0)),
    "Q5_K": replace(_K, block_bytes=176, high=1, read=partial(_read_k, 48, 16)),
    "Q6_K": replace(
        _K,
        scale="signed",
        minimum="none",
        offset=32,
        high=2,
        group=16,
        block_bytes=210,
        read=_read_q6_k,
    ),
    "MXFP4": Format(4, number="e2m1", scale="power", block=32, block_bytes=17, read=_read_mxfp4),
    "int8": Format(8, scale="float", offset=128, super_size=0),
    "fp8_e4m3": Format(8, number="e4m3", scale="float", super_size=0),
    "fp8_e4m3_blocks": Format(8, number="e4m3", scale="float", super_size=128),
    # With `super_size` columns of a group.
    "weight_only 4": Format(4, scale="float", minimum="zero", super_size=0),
    "weight_only 8": Format(8, scale="float", minimum="zero", super_size=0),
    # An e4m3 scale for each 16 columns, and one of the tensor.
    "nvfp4": Format(4, number="e2m1", scale="e4m3", group=16, super_size=0),
}


def pack_rows(form: Format, parts: Parts) -> torch.Tensor:
    """Return rows [R, bytes] uint8 in the layout of `planes`."""
    rows, columns = parts.numbers.shape
    planes = form.planes(columns)
    padding = planes.columns - columns
    numbers = F.pad(parts.numbers, (0, padding))
    sections = [numbers]
    if form.bits == 4:
        units = numbers.view(rows, -1, 2, 32)
        sections = [(units[:, :, 0] & 15 | (units[:, :, 1] & 15) << 4).flatten(1)]
    if form.high:
        groups = (numbers >> 4).view(rows, -1, 8 // form.high, 32)
        sections.append(
            sum(
                (groups[:, :, place] << form.high * place for place in range(1, groups.shape[2])),
                start=groups[:, :, 0],
            ).flatten(1)
        )
    out = torch.zeros(rows, planes.row_bytes, dtype=torch.uint8, device=numbers.device)
    begins = [0, planes.high] if form.high else [0]
    for begin, plane in (
        *zip(begins, sections, strict=True),
        (planes.subs, parts.subs),
        (planes.minima, parts.minima),
        (planes.scales, parts.scales),
    ):
        if plane is not None:
            stored = plane.contiguous().view(rows, -1).view(torch.uint8)
            out[:, begin : begin + stored.shape[1]] = stored
    return out


def pack_blocks(form: Format, blocks: torch.Tensor) -> torch.Tensor:
    """Pack blocks [R, bytes] uint8 of a GGUF file."""
    assert form.read is not None
    columns = blocks.shape[1] // form.block_bytes * form.block
    chunks = blocks.split(max(1, _AT_ONCE // columns))  # type: ignore[no-untyped-call]
    return torch.cat(
        [
            pack_rows(form, form.read(chunk.view(len(chunk), -1, form.block_bytes)))
            for chunk in chunks
        ]
    )


def values_of(form: Format, packed: torch.Tensor, columns: int) -> torch.Tensor:
    """Return the values [R, columns] float32 of packed rows, in plain torch."""
    planes, rows = form.planes(columns), len(packed)
    numbers = packed[:, : planes.columns * form.bits // 8]
    if form.bits == 4:
        units = numbers.reshape(rows, -1, 1, 32)
        numbers = torch.cat((units & 15, units >> 4), dim=2).flatten(1)
    if form.high:
        high = packed[:, planes.high : planes.high + planes.columns * form.high // 8]
        shifts = torch.arange(0, 8, form.high, dtype=torch.uint8, device=packed.device)[:, None]
        high = high.reshape(rows, -1, 1, 32) >> shifts & ((1 << form.high) - 1)
        numbers = numbers | high.flatten(1) << 4
    found = _floats(form.number, numbers) - form.offset

    def each(plane: torch.Tensor, size: int) -> torch.Tensor:
        return plane.repeat_interleave(size, 1)[:, : planes.columns]

    size = form.columns_of_scale(planes.columns)
    count = -(-planes.columns // size)
    dtype = torch.float32 if form.scale in ("float", "e4m3") else _HALF
    paired = 2 if form.minimum in ("half", "sub") else 1
    stored = packed[:, planes.scales : planes.scales + count * paired * dtype.itemsize]
    if form.scale == "power":
        scale = torch.ones(rows, planes.columns, device=packed.device)
        pairs = scale[..., None]
    else:
        pairs = stored.contiguous().view(dtype).float().view(rows, count, paired)
        scale = each(pairs[..., 0], size)
    if form.scale in ("unsigned", "signed", "e4m3", "power"):
        subs = packed[:, planes.subs : planes.subs + planes.columns // form.group]
        scale = scale * each(_floats(form.scale, subs), form.group)
    if form.minimum == "zero":
        found = found - each(packed[:, planes.minima : planes.minima + count].float(), size)
    found = found * scale
    if form.minimum == "half":
        found = found + each(pairs[..., 1], size)
    elif form.minimum == "sub":
        minima = packed[:, planes.minima : planes.minima + planes.columns // 32].float()
        found = found - each(pairs[..., 1], size) * each(minima, 32)
    return found[:, :columns]


def _floats(kind: str, codes: torch.Tensor) -> torch.Tensor:
    """Return the numbers that bytes stand for."""
    if kind == "e4m3":
        return codes.contiguous().view(torch.float8_e4m3fn).float()
    if kind == "signed":
        return codes.contiguous().view(torch.int8).float()
    if kind == "power":
        return (codes.int() << 23).view(torch.float32)
    if kind == "e2m1":
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=codes.device)
        return table[(codes & 7).long()] * (1 - (codes >> 3).float() * 2)
    return codes.float()
