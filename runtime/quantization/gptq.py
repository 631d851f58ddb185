"""GPTQ (arXiv:2210.17323) as AutoGPTQ and GPTQModel write it.

Source of fields and layout: GPTQModel's gptqmodel/quantization/config.py,
gptqmodel/nn_modules/qlinear and gptqmodel/utils/model.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..config.quantization_registry import PLAIN, Scheme
from ..layers.linear import Axis, CannotSplitError, Linear, Place
from .config import Patterns, names, setting
from .grouped_weight import (
    BITS,
    GroupedWeight,
    check_scale,
    fields,
    reordered,
    word_bytes,
)
from .weight_only import ACT_ORDER, INT32, PackedFormat, group_size, words_of

QUANT_METHOD = "gptq"
_VERSIONS = {"gptq": "v1", "gptq_v2": "v2"}
_ONES = {4: 0x11111111, 8: 0x01010101}
_MOST_RULES = 100


def read_scheme(config: Mapping[str, Any]) -> Scheme:
    patterns = Patterns()
    kind, rules = _kind(config), _rules(config, patterns)
    has_head = setting(config, "lm_head", bool, False)
    # All layers of decoder blocks are quantised, unless the config lists layers, singly or in
    # groups.
    listed = setting(config, "modules_in_block_to_quantize", list, [])
    flat = [name for item in listed for name in (item if isinstance(item, list) else [item])]
    is_inside = patterns.matcher(
        names({"modules_in_block_to_quantize": flat}, "modules_in_block_to_quantize"), parts=True
    )

    def scheme(name: str) -> str:
        if not (has_head if name == "lm_head" else not flat or is_inside(name)):
            return PLAIN
        return next((found for matches, found in rules if matches(name)), kind)

    return scheme


def _kind(config: Mapping[str, Any]) -> str:
    form = str(config.get("checkpoint_format") or config.get("format") or "gptq")
    bits = setting(config, "bits", int)
    words = config.get("pack_dtype") or "int32"
    if bits not in BITS or form not in _VERSIONS or words != "int32":
        raise ValueError(
            f"GPTQ of {bits} bits in the format {form[:80]}, packed in {str(words)[:80]}, is "
            "not supported; supported: 4 and 8 bits in the formats gptq and gptq_v2, packed in "
            "int32; take another checkpoint"
        )
    order = "act-order" if setting(config, "desc_act", bool, False) else "in-order"
    return f"gptq {bits} {group_size(config)} {_VERSIONS[form]} {order}"


def _rules(
    config: Mapping[str, Any], patterns: Patterns
) -> list[tuple[Callable[[str], bool], str]]:
    """Return GPTQModel's `dynamic`: matchers of layer names with the kind of these layers.

    The first match counts. Layers whose pattern begins with "-:" are not quantised.
    """
    dynamic = setting(config, "dynamic", dict, {})
    if len(dynamic) > _MOST_RULES:
        raise ValueError(
            f"quantization_config: dynamic has more than {_MOST_RULES} rules; take another "
            "checkpoint"
        )
    rules = []
    for pattern in dynamic:
        matches = patterns.matcher([f"re:{pattern.removeprefix('-:').removeprefix('+:')}"])
        if pattern.startswith("-:"):
            rules.append((matches, PLAIN))
        else:
            rules.append((matches, _kind({**config, **setting(dynamic, pattern, dict, {})})))
    return rules


class GPTQ(PackedFormat):
    """The method of a kind "gptq BITS COLUMNS VERSION ORDER".

    COLUMNS are the columns of a group, or -1 for all. Version v1 stores zero points less one. With
    act-order, the checkpoint states the group of each column.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        _, bits, columns, self.version, self.order = kind.split()
        self.bits, self.columns = int(bits), int(columns)

    def create(self, layer: Linear) -> None:
        if self.order == "act-order" and layer.held_columns is not None:
            raise CannotSplitError(ACT_ORDER)
        super().create(layer)

    def places(self, layer: Linear, part: str) -> Mapping[str, Place]:
        rows, columns = layer.parts[part], layer.in_features
        groups, group = columns // self.columns_of(layer), self.groups(0)
        words, a_word = words_of(columns, self.bits), 32 // self.bits
        zero_words = words_of(rows, self.bits)
        places = {
            "qweight": self.place(
                part, (words, rows), INT32, rows=Axis(1), columns=Axis(0, a_word)
            ),
            "qzeros": self.place(
                part, (groups, zero_words), INT32, rows=Axis(1, a_word), columns=group
            ),
            "scales": self.place(
                part, (groups, rows), check=check_scale, rows=Axis(1), columns=group
            ),
            "g_idx": self.order_place(layer, part, is_optional=self.order == "in-order"),
        }
        if layer.bias is None:
            # AutoGPTQ gives every layer a bias.
            places["bias"] = self.place(
                part, (rows,), check=_check_unused, is_optional=True, rows=Axis(0)
            )
        return places

    def unpack(self, layer: Linear, tensors: Mapping[str, torch.Tensor]) -> GroupedWeight:
        return unpack(
            tensors["qweight"],
            tensors["qzeros"],
            tensors["scales"],
            # If columns are split over ranks, groups are in order.
            tensors.get("g_idx") if layer.held_columns is None else None,
            self.bits,
            zeros_less_one=self.version == "v1",
        )


def _check_unused(bias: torch.Tensor) -> None:
    if bias.any():
        raise ValueError("is a bias, but the model's configuration has none")


def make_method(kind: str) -> GPTQ:
    return GPTQ(kind)


def unpack(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    g_idx: torch.Tensor | None,
    bits: int,
    *,
    zeros_less_one: bool,
) -> GroupedWeight:
    """Return the weight of the tensors of a checkpoint.

    qweight [K * bits / 32, N] int32, qzeros [groups, N * bits / 32] int32, scales [groups, N].
    g_idx [K] int32 is the group of each column, or None if groups are in order.

    `zeros_less_one`: zero points are stored less one. One is added to whole words, because
    GPTQModel subtracts it from whole words, with borrows.
    """
    numbers = word_bytes(qweight.T)
    zeros = fields(qzeros + _ONES[bits] if zeros_less_one else qzeros, bits)
    weight = GroupedWeight(numbers, scales.T.contiguous(), zeros.T.contiguous())
    return weight if g_idx is None else reordered(weight, g_idx, bits)
