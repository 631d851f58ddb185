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


def read_scheme(config: Mapping[str, Any]) -> Scheme:
    # Older files have the fields in an object of their own.
    fields = setting(config, "quantization", dict, dict(config))
    algorithm = fields.get("quant_algo")
    group = setting(fields, "group_size", int, GROUP)
    if algorithm != "NVFP4" or group != GROUP:
        raise ValueError(
            f"modelopt checkpoints with quant_algo {str(algorithm)[:40]} and groups of {group} are "
            f"not supported; supported: NVFP4 with groups of {GROUP}; take another checkpoint"
        )
    left_out = [*names(fields, "ignore"), *names(fields, "exclude_modules")]
    is_plain = Patterns().matcher([_pattern(name) for name in left_out], parts=True)
    return lambda name: PLAIN if is_plain(name) else "nvfp4 modelopt" + FP4


def _pattern(name: str) -> str:
    """Return the pattern of a name in which "*" stands for any characters."""
    if "*" not in name:
        return name
    return EXPRESSION + ".*".join(map(re.escape, name.split("*"))) + "$"
