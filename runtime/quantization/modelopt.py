"""Checkpoints of `quant_method` modelopt, as NVIDIA's Model Optimizer writes them, in NVFP4.

Source of the fields: the library's torch/export/convert_hf_config.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..config.quantization_registry import PLAIN, Scheme
from .config import EXPRESSION, Patterns, names, setting
from .nvfp4 import FP4, GROUP

QUANT_METHOD = "modelopt"
_KINDS = {"NVFP4": "nvfp4 modelopt" + FP4, "W4A16_NVFP4": "nvfp4 modelopt"}


def read_scheme(config: Mapping[str, Any]) -> Scheme:
    # Older files have the fields in an object of their own.
    fields = setting(config, "quantization", dict, dict(config))
    algorithm = str(fields.get("quant_algo"))[:40]
    group = setting(fields, "group_size", int, GROUP)
    if algorithm not in _KINDS or group != GROUP:
        raise ValueError(
            f"modelopt checkpoints with quant_algo {algorithm} and groups of {group} are not "
            f"supported; supported: {' and '.join(_KINDS)} with groups of {GROUP}; take another "
            "checkpoint"
        )
    left_out = [*names(fields, "ignore"), *names(fields, "exclude_modules")]
    is_plain = Patterns().matcher([_pattern(name) for name in left_out], parts=True)
    return lambda name: PLAIN if is_plain(name) else _KINDS[algorithm]


def _pattern(name: str) -> str:
    """Return the pattern of a name in which "*" stands for any characters."""
    if "*" not in name:
        return name
    return EXPRESSION + ".*".join(map(re.escape, name.split("*"))) + "$"
