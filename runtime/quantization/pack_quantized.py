"""compressed-tensors' format `pack-quantized`: W4A16 and W8A16.

Layout: the library's compressors/pack_quantized.
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
_UNSET = -1
"""All that a group index holds as the library makes it, before something is put into it. Such a one
it leaves out of the file, so `actorder: group` alone promises none; from 0.20 on there is none.
"""


def kind_of(weights: Mapping[str, Any]) -> str | None:
    """The kind of layers whose `weights` a config group describes so; None for what is not
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
    """A kind is "pack_quantized BITS COLUMNS ZEROS": columns of a group or -1 for all; `symmetric`
    where there are no zero points, else `zeros`.
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
            # Groups are in turn where a rank has some of the columns.
            tensors.get("weight_g_idx") if layer.held_columns is None else None,
            layer.in_features,
            self.bits,
        )


def _words(numbers: int, bits: int) -> int:
    """The last word of a row or column is filled up."""
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
    """weight_packed [N, ceil(K * bits / 32)] int32, weight_scale [N, groups], weight_zero_point
    [ceil(N * bits / 32), groups] int32 or None where all are zero, weight_g_idx [K] int32: the
    group of each column, None where they are in turn.

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
