"""Weights of 4 or 8 bits in groups, such as those of AWQ, GPTQ and pack-quantized files once they
are unpacked.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

BITS = (4, 8)
_GGUF_COLUMNS = 32
"""Columns that have one scale in a block of GGUF's Q4_1 and Q8_0."""
_LARGEST_SCALE = 4096.0
"""15 times it is still a float16."""


class GroupedWeight(NamedTuple):
    """A weight [N, K] as `ops.weight_only_linear` takes it: each row's columns are in groups that
    follow one another, and (number - zero) * scale is the value.

    `numbers`: [N, K * bits / 8] uint8, of 4 bits the earlier column in the low half of a byte.
    `scale`: [N, groups] of 16 or 32 bits. `zero`: [N, groups] uint8. `order`: [K] int64, the column
    of the input that each column belongs to, None where they are in order.
    """

    numbers: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    order: torch.Tensor | None = None


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[..., n] bytes to [..., 2 n] numbers of 4 bits, the low halves first."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def packed_nibbles(numbers: torch.Tensor) -> torch.Tensor:
    """What `nibbles` undoes: [..., 2 n] uint8 below 16 to [..., n] uint8."""
    return numbers[..., ::2] | numbers[..., 1::2] << 4


def regrouped(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Bytes of two numbers of 4 bits, [..., n] each, to [..., n, 2]: the low halves of both, and
    the high halves of both, `first`'s in the lower bits.
    """
    return torch.stack((first & 15 | second << 4, first >> 4 | second & 240), dim=-1)


def fields(words: torch.Tensor, bits: int) -> torch.Tensor:
    """[..., n] int32 to [..., n * 32 / bits] uint8: the numbers in each word, from its lowest bits
    on.
    """
    found = word_bytes(words)
    return nibbles(found) if bits == 4 else found


def word_bytes(words: torch.Tensor) -> torch.Tensor:
    """[..., n] int32 to [..., 4 n] uint8, the lowest byte of each word first."""
    # `contiguous` leaves dimensions of one element their stride, which `view` does not take.
    return words.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def column_order(group_of: torch.Tensor, groups: int) -> torch.Tensor | None:
    """Columns [K] int64, sorted so that `groups` groups follow one another, None where they do
    already; column k is of group `group_of[k]`.

    Raises `ValueError` where a number is no group's, or groups are not of one size.
    """
    if int(group_of.min()) < 0 or int(group_of.max()) >= groups:
        raise ValueError(f"names groups other than the {groups} that have a scale")
    size = len(group_of) // groups
    if (group_of.bincount(minlength=groups) != size).any():
        raise ValueError(f"does not give each of {groups} groups {size} columns")
    order = group_of.argsort(stable=True)
    return None if torch.equal(order, torch.arange(len(order))) else order


def reordered(weight: GroupedWeight, group_of: torch.Tensor, bits: int) -> GroupedWeight:
    """The same weight, whose column k is of group `group_of[k]`, in the order of the groups."""
    order = column_order(group_of, weight.scale.shape[1])
    if order is None:
        return weight
    if bits == 8:
        return weight._replace(numbers=weight.numbers[:, order], order=order)
    numbers = packed_nibbles(nibbles(weight.numbers)[:, order])
    return weight._replace(numbers=numbers, order=order)


def widened(weight: GroupedWeight, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """The values [N, K], of columns as the layer's input has them."""
    numbers = nibbles(weight.numbers) if bits == 4 else weight.numbers
    groups = numbers.view(*weight.scale.shape, -1).float() - weight.zero.unsqueeze(-1).float()
    values = (groups * weight.scale.float().unsqueeze(-1)).flatten(1).to(dtype)
    if weight.order is None:
        return values
    return torch.empty_like(values).index_copy_(1, weight.order, values)


def check_scale(scale: torch.Tensor) -> None:
    """Raises `ValueError` for what no quantiser writes: holes of a broken download are zeros."""
    if not bool(scale.isfinite().all()):
        raise ValueError("holds NaN or infinity")
    if not bool(scale.all()):
        raise ValueError("holds 0")
    if float(scale.abs().max()) > _LARGEST_SCALE:
        raise ValueError(f"holds a number above {_LARGEST_SCALE:g}")


def gguf_kind(bits: int, columns: int, *, symmetric: bool) -> str | None:
    """The format of GGUF whose blocks can hold such a weight, whose groups are of `columns`
    columns; None where none can. `symmetric`: all zero points are 2^(bits - 1).
    """
    if columns % _GGUF_COLUMNS:
        return None
    if bits == 4:
        return "Q4_1"
    return "Q8_0" if symmetric else None


def gguf_blocks(weight: GroupedWeight, kind: str) -> torch.Tensor:
    """The rows as blocks of `kind`, [N, bytes] uint8; ggml-org/ggml, src/ggml-common.h: a block's
    scale in float16, in Q4_1 its least value (-zero * scale), 32 numbers. Of 4 bits the first 16
    are the low halves of bytes.

    Scales lose what float16 does not hold. So does the least value, at most 2^-11 of itself, an
    eighth of what numbers lose when they become bfloat16.
    """
    rows = weight.numbers.shape[0]
    if kind == "Q8_0":
        numbers = (weight.numbers ^ 128).view(rows, -1, _GGUF_COLUMNS)
    else:
        halves = weight.numbers.view(rows, -1, 2, _GGUF_COLUMNS // 4)
        numbers = regrouped(halves[:, :, 0], halves[:, :, 1]).flatten(2)
    scale = weight.scale.float()
    headers = [scale, -weight.zero.float() * scale] if kind == "Q4_1" else [scale]
    repeats = numbers.shape[1] // scale.shape[1]
    header = torch.stack(headers, dim=-1).half().repeat_interleave(repeats, dim=1)
    return torch.cat((header.view(torch.uint8), numbers), dim=-1).flatten(1)
