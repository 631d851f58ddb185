"""AWQ (arXiv:2306.00978) in the layout of AutoAWQ's `gemm` kernels.

Source of fields and layout: AutoAWQ's awq/models/_config.py and awq/modules/linear/gemm.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..config.quantization_registry import PLAIN, Scheme
from ..layers.linear import Axis, Linear, Place
from .config import Patterns, names, setting
from .grouped_weight import GroupedWeight, check_scale, fields, regrouped, word_bytes
from .weight_only import INT32, PackedFormat, group_size, words_of

QUANT_METHOD = "awq"
BITS = 4
# Positions, from the lowest bits on, of the numbers of eight outputs in a word.
_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]


def read_scheme(config: Mapping[str, Any]) -> Scheme:
    bits, version = setting(config, "bits", int), setting(config, "version", str, "gemm")
    if bits != BITS or version.lower() != "gemm":
        raise ValueError(
            f"AWQ of {bits} bits in the version {version[:80]} is not supported; supported: 4 bits "
            "in the version gemm; use another checkpoint"
        )
    columns = group_size(config)
    # AutoAWQ quantises only layers of decoder blocks.
    left_out = [*names(config, "modules_to_not_convert"), "lm_head"]
    is_plain = Patterns().matcher(left_out, parts=True)
    return lambda name: PLAIN if is_plain(name) else f"awq {columns}"


class AWQ(PackedFormat):
    """The method of a kind "awq COLUMNS". COLUMNS are the columns of a group, or -1 for all."""

    bits = BITS

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.columns = kind, int(kind.split()[1])

    def places(self, layer: Linear, part: str) -> Mapping[str, Place]:
        rows, groups = layer.parts[part], layer.in_features // self.columns_of(layer)
        words, word, group = words_of(rows, BITS), Axis(1, 32 // BITS), self.groups(0)
        return {
            "qweight": self.place(
                part, (layer.in_features, words), INT32, rows=word, columns=Axis(0)
            ),
            "qzeros": self.place(part, (groups, words), INT32, rows=word, columns=group),
            "scales": self.place(
                part, (groups, rows), check=check_scale, rows=Axis(1), columns=group
            ),
        }

    def unpack(self, layer: Linear, tensors: Mapping[str, torch.Tensor]) -> GroupedWeight:
        return unpack(**tensors)


def make_method(kind: str) -> AWQ:
    return AWQ(kind)


def unpack(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor) -> GroupedWeight:
    """Return the weight of qweight [K, N / 8] int32, qzeros [groups, N / 8] int32 and scales
    [groups, N].
    """
    # [N / 8, K, 4] bytes. Each byte holds numbers of two rows.
    of_words = word_bytes(qweight.T).view(qweight.shape[1], -1, 4)
    rows = regrouped(of_words[:, ::2], of_words[:, 1::2]).flatten(2)[..., _PLACES]
    numbers = rows.transpose(1, 2).reshape(-1, rows.shape[1])
    zero = fields(qzeros, BITS).view(len(qzeros), -1, 8)[..., _PLACES].flatten(1)
    return GroupedWeight(numbers, scales.T.contiguous(), zero.T.contiguous())
