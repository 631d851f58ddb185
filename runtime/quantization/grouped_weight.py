"""Weights of 4 or 8 bits in groups, such as those of AWQ, GPTQ and pack-quantized files after
unpacking.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

BITS = (4, 8)
_GGUF_COLUMNS = 32  # Columns that share a scale in a block of GGUF's Q4_1 and Q8_0.
_LARGEST_SCALE = 4096.0  # 15 times this fits into a float16.


class GroupedWeight(NamedTuple):
    """A weight [N, K] for `ops.weight_only_linear`. Its values are (number - zero) * scale.

    Attributes:
        numbers: [N, K * bits / 8] uint8. Of two numbers of 4 bits, the earlier column is in the low
            half of the byte.
        scale: [N, groups] of 16 or 32 bits. Groups are consecutive columns.
        zero: [N, groups] uint8.
        order: [K] int64, the column of the input that each column belongs to, or None if they are
            in order.
    """

    numbers: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    order: torch.Tensor | None = None


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return [..., 2 n] numbers of 4 bits of [..., n] bytes, low halves first."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def packed_nibbles(numbers: torch.Tensor) -> torch.Tensor:
    """Return [..., n] uint8 of [..., 2 n] uint8 below 16: the inverse of `nibbles`."""
    return numbers[..., ::2] | numbers[..., 1::2] << 4


def regrouped(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return [..., n, 2] of bytes [..., n] that hold two numbers of 4 bits each.

    They are the low halves of both, then the high halves of both, with `first` in the lower bits.
    """
    return torch.stack((first & 15 | second << 4, first >> 4 | second & 240), dim=-1)


def fields(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return [..., n * 32 / bits] uint8 of [..., n] int32: the numbers in each word, from its
    lowest bits on.
    """
    found = word_bytes(words)
    return nibbles(found) if bits == 4 else found


def word_bytes(words: torch.Tensor) -> torch.Tensor:
    """Return [..., 4 n] uint8 of [..., n] int32, the lowest byte of each word first."""
    # `contiguous` keeps the stride of dimensions of size 1, which `view` does not accept.
    return words.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def column_order(group_of: torch.Tensor, groups: int) -> torch.Tensor | None:
    """Return the columns [K] int64 sorted by their groups `group_of`, or None if they already are.

    Raises `ValueError` if there is no such group, or if groups differ in size.
    """
    if int(group_of.min()) < 0 or int(group_of.max()) >= groups:
        raise ValueError(f"names groups other than the {groups} that have a scale")
    size = len(group_of) // groups
    if (group_of.bincount(minlength=groups) != size).any():
        raise ValueError(f"does not give each of {groups} groups {size} columns")
    order = group_of.argsort(stable=True)
    return None if torch.equal(order, torch.arange(len(order))) else order


def reordered(weight: GroupedWeight, group_of: torch.Tensor, bits: int) -> GroupedWeight:
    """Return the weight, whose column k is in group `group_of[k]`, with columns sorted by their
    groups.
    """
    order = column_order(group_of, weight.scale.shape[1])
    if order is None:
        return weight
    if bits == 8:
        return weight._replace(numbers=weight.numbers[:, order], order=order)
    numbers = packed_nibbles(nibbles(weight.numbers)[:, order])
    return weight._replace(numbers=numbers, order=order)


def widened(weight: GroupedWeight, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the values [N, K], with columns in the order of the layer's input."""
    numbers = nibbles(weight.numbers) if bits == 4 else weight.numbers
    groups = numbers.view(*weight.scale.shape, -1).float() - weight.zero.unsqueeze(-1).float()
    values = (groups * weight.scale.float().unsqueeze(-1)).flatten(1).to(dtype)
    if weight.order is None:
        return values
    return torch.empty_like(values).index_copy_(1, weight.order, values)


def check_scale(scale: torch.Tensor) -> None:
    """Raise `ValueError` for scales that no quantiser writes.

    For example, a download with holes has zeros.
    """
    if not bool(scale.isfinite().all()):
        raise ValueError("holds NaN or infinity")
    if not bool(scale.all()):
        raise ValueError("holds 0")
    if float(scale.abs().max()) > _LARGEST_SCALE:
        raise ValueError(f"holds a number above {_LARGEST_SCALE:g}")


def gguf_kind(bits: int, columns: int, *, symmetric: bool) -> str | None:
    """Return the format of GGUF whose blocks can hold a weight with groups of `columns`, or None.

    `symmetric`: all zero points are 2^(bits - 1).
    """
    if columns % _GGUF_COLUMNS:
        return None
    if bits == 4:
        return "Q4_1"
    return "Q8_0" if symmetric else None


def gguf_blocks(weight: GroupedWeight, kind: str) -> torch.Tensor:
    """Return the rows as blocks of `kind`, [N, bytes] uint8 (ggml-org/ggml, src/ggml-common.h).

    A block has a scale in float16, in Q4_1 also the least value (-zero * scale), and 32 numbers.
    The first 16 numbers of 4 bits are the low halves of bytes.

    Scales and least values are rounded to float16. The least value changes by at most 2^-11 of
    itself, an eighth of the error of rounding to bfloat16.
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
