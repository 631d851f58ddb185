"""The format `pack-quantized` of compressed-tensors: W4A16 and W8A16.

Source of the layout: the library's compressors/pack_quantized.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..layers.linear import Axis, Linear, Place
from .config import setting
from .grouped_weight import (
    BITS,
    GroupedWeight,
    check_scale,
    fields,
    reordered,
    word_bytes,
)
from .weight_only import INT32, PackedFormat, group_size

FORMAT = "pack-quantized"
# The library fills a new group index with this value. An index that is still unset is not saved, so
# `actorder: group` does not guarantee one. From 0.20 on there is none.
_UNSET = -1


def kind_of(weights: Mapping[str, Any]) -> str | None:
    """Return the kind of layers with these `weights` of a config group, or None if it is not
    supported.
    """
    bits = setting(weights, "num_bits", int)
    if weights.get("type") != "int" or bits not in BITS or weights.get("dynamic"):
        return None
    match weights.get("strategy"):
        case "group":
            columns = group_size(weights)
        case "channel":
            columns = -1
        case _:
            return None
    zeros = "symmetric" if setting(weights, "symmetric", bool, True) else "zeros"
    return f"pack_quantized {bits} {columns} {zeros}"


class PackQuantized(PackedFormat):
    """The method of a kind "pack_quantized BITS COLUMNS ZEROS".

    COLUMNS are the columns of a group, or -1 for all. ZEROS is `symmetric` if there are no zero
    points, else `zeros`.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        _, bits, columns, zeros = kind.split()
        self.bits, self.columns = int(bits), int(columns)
        self.is_symmetric = zeros == "symmetric"

    def places(self, layer: Linear, part: str) -> Mapping[str, Place]:
        rows, columns = layer.parts[part], layer.in_features
        groups, group = columns // self.columns_of(layer), self.groups(1)
        a_word = 32 // self.bits
        held_rows = layer.held_rows.get(part)
        whole = [rows if held_rows is None else held_rows.whole, layer.whole_in_features]

        def check_shape(shape: torch.Tensor) -> None:
            if shape.tolist() != whole:
                raise ValueError(f"is {shape.tolist()}, but the model asks for {whole}")

        places = {
            "weight_packed": self.place(
                part,
                (rows, _words(columns, self.bits)),
                INT32,
                rows=Axis(0),
                columns=Axis(1, a_word),
            ),
            "weight_scale": self.place(
                part, (rows, groups), check=check_scale, rows=Axis(0), columns=group
            ),
            "weight_shape": self.place(
                part, (2,), (torch.int64, torch.int32), check_shape, is_optional=True
            ),
            "weight_g_idx": self.order_place(layer, part, is_optional=True, unset=_UNSET),
        }
        if not self.is_symmetric:
            shape = _words(rows, self.bits), groups
            places["weight_zero_point"] = self.place(
                part, shape, INT32, rows=Axis(0, a_word), columns=group
            )
        return places

    def unpack(self, layer: Linear, tensors: Mapping[str, torch.Tensor]) -> GroupedWeight:
        return unpack(
            tensors["weight_packed"],
            tensors["weight_scale"],
            tensors.get("weight_zero_point"),
            # If columns are split over ranks, groups are in order.
            tensors.get("weight_g_idx") if layer.held_columns is None else None,
            layer.in_features,
            self.bits,
        )


def _words(numbers: int, bits: int) -> int:
    """Return the words that hold `numbers`. The last word is padded."""
    return -(-numbers * bits // 32)


def make_method(kind: str) -> PackQuantized:
    return PackQuantized(kind)


def unpack(
    weight_packed: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_zero_point: torch.Tensor | None,
    weight_g_idx: torch.Tensor | None,
    in_features: int,
    bits: int,
) -> GroupedWeight:
    """Return the weight of the tensors of a checkpoint.

    weight_packed [N, ceil(K * bits / 32)] int32, weight_scale [N, groups]. weight_zero_point
    [ceil(N * bits / 32), groups] int32 is None if all are zero. weight_g_idx [K] int32 is the group
    of each column, or None if groups are in order.

    Numbers and zero points are stored plus 2^(bits - 1).
    """
    rows = weight_packed.shape[0]
    numbers = word_bytes(weight_packed)[:, : in_features * bits // 8].contiguous()
    if weight_zero_point is None:
        zero = torch.full(weight_scale.shape, 1 << (bits - 1), dtype=torch.uint8)
    else:
        zero = fields(weight_zero_point.T, bits)[:, :rows].T.contiguous()
    weight = GroupedWeight(numbers, weight_scale, zero)
    if weight_g_idx is None or bool((weight_g_idx == _UNSET).all()):
        return weight
    return reordered(weight, weight_g_idx, bits)
