"""Checkpoints of `quant_method` compressed-tensors, as llm-compressor writes them.

Source of the fields: the library's quantization/quant_config.py, quant_scheme.py and quant_args.py.
Source of the formats: config/base.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config.quantization_registry import PLAIN, Scheme
from . import nvfp4, pack_quantized
from .config import EXPRESSION, Patterns, names, setting
from .w8a8 import BLOCK

QUANT_METHOD = "compressed-tensors"
_W8A8_FORMATS = ("float-quantized", "int-quantized", "naive-quantized")
_CLASS = "Linear"
_MOST_GROUPS = 32


def read_scheme(config: Mapping[str, Any]) -> Scheme:
    # These settings change weights or activations other than by quantisation.
    for key in ("sparsity_config", "transform_config"):
        value = config.get(key)
        if value and not (isinstance(value, dict) and value.get("format") == "dense"):
            raise ValueError(
                f"compressed-tensors with a {key} are not supported; use a checkpoint without it"
            )
    groups, patterns = setting(config, "config_groups", dict), Patterns()
    kinds: dict[str, str] = {}
    if len(groups) > _MOST_GROUPS:
        raise ValueError(
            f"quantization_config: more than {_MOST_GROUPS} config_groups are not supported; take "
            "another checkpoint"
        )
    for label, group in groups.items():
        if not isinstance(group, dict):
            raise ValueError(f"quantization_config: config_groups.{label[:80]} must be an object")
        kind = _kind(group, str(group.get("format") or config.get("format")))
        kinds |= dict.fromkeys(names(group, "targets"), kind)
    # The order is that of `match_targets` in the library's utils/match.py: names, patterns sorted
    # by their text, classes. Of groups with the same target the last one counts.
    by_pattern = [
        (patterns.matcher([target]), kinds[target])
        for target in sorted(kinds)
        if target.startswith(EXPRESSION)
    ]
    is_ignored = patterns.matcher(names(config, "ignore"))

    def scheme(name: str) -> str:
        if is_ignored(name):
            return PLAIN
        if name in kinds:
            return kinds[name]
        found = (kind for matches, kind in by_pattern if matches(name))
        return next(found, kinds.get(_CLASS, PLAIN))

    return scheme


def _kind(group: Mapping[str, Any], form: str) -> str:
    weights = setting(group, "weights", dict)
    inputs = group.get("input_activations")
    outputs = group.get("output_activations")
    if form == pack_quantized.FORMAT and not (inputs or outputs):
        packed = pack_quantized.kind_of(weights)
        if packed is not None:
            return packed
    each = [args for args in (weights, inputs) if args is not None]
    if form == nvfp4.FORMAT and not outputs and all(map(_is_nvfp4, each)):
        return "nvfp4 compressed" + nvfp4.FP4 * (inputs is not None)
    if outputs or form not in _W8A8_FORMATS:
        raise _unsupported(form, weights, inputs)
    dtype = {("float", "8"): "float8_e4m3fn", ("int", "8"): "int8"}.get(_number(weights))
    weight = weights.get("strategy")
    if (
        dtype is None
        or not isinstance(inputs, dict)
        or _number(inputs) != _number(weights)
        or not (weights.get("symmetric", True) and inputs.get("symmetric", True))
        or weights.get("dynamic")
    ):
        raise _unsupported(form, weights, inputs)
    match weight, inputs.get("strategy"), inputs.get("dynamic"):
        case "tensor" | "channel", "token", True:
            scales = f"{weight} token"
        case "tensor" | "channel", "tensor", False | None:
            scales = f"{weight} static"
        case "block", "group", True if (
            weights.get("block_structure") == [BLOCK, BLOCK] and inputs.get("group_size") == BLOCK
        ):
            scales = "block group"
        case _:
            raise _unsupported(form, weights, inputs)
    return f"w8a8 {dtype} {scales} weight_scale"


def _is_nvfp4(args: object) -> bool:
    if not isinstance(args, dict):
        return False
    form = _number(args), args.get("strategy"), args.get("group_size")
    return form == (("float", "4"), "tensor_group", nvfp4.GROUP)


def _number(args: Mapping[str, Any]) -> tuple[str, str]:
    return str(args.get("type")), str(args.get("num_bits"))


def _unsupported(form: str, weights: object, inputs: object) -> ValueError:
    def shown(args: object) -> str:
        if not isinstance(args, dict):
            return "16 bits"
        words = [args.get("type"), args.get("num_bits"), "bits by", args.get("strategy")]
        words.append("dynamic" if args.get("dynamic") else "static")
        words += [] if args.get("symmetric", True) else ["asymmetric"]
        return " ".join(str(word)[:40] for word in words)

    return ValueError(
        f"compressed-tensors of format {form[:80]} with weights as {shown(weights)} and "
        f"activations as {shown(inputs)} are not supported; supported: 8-bit weights by "
        "tensor, channel or block with activations by token, tensor (static) or group, symmetric, "
        f"float or int; {pack_quantized.FORMAT} int weights of 4 or 8 bits by group or channel "
        f"with activations of 16 bits; {nvfp4.FORMAT}; take another checkpoint"
    )
