"""Checkpoints of `quant_method` fp8.

They have one scale for each tensor, as those of Llama and Mistral, or for each block of 128 x 128,
as those of DeepSeek and Qwen3. Source of the fields: transformers' `FineGrainedFP8Config` and
vLLM's `Fp8Config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config.quantization_registry import PLAIN, Scheme
from .config import Patterns, names, setting
from .w8a8 import BLOCK

QUANT_METHOD = "fp8"


def read_scheme(config: Mapping[str, Any]) -> Scheme:
    activations = setting(config, "activation_scheme", str, "dynamic")
    if activations not in ("static", "dynamic"):
        raise ValueError(
            f"quantization_config: activation_scheme must be static or dynamic, got "
            f"{activations[:80]!r}; download the model again"
        )
    if config.get("fmt") not in (None, "e4m3"):
        raise ValueError(
            f"FP8 weights in the format {str(config['fmt'])[:80]} are not supported; supported: "
            "e4m3; take another checkpoint"
        )
    if (block := config.get("weight_block_size")) is None:
        kind = f"tensor {'static' if activations == 'static' else 'token'} weight_scale"
    elif block == [BLOCK, BLOCK] and activations == "dynamic":
        kind = "block group weight_scale_inv"
    else:
        raise ValueError(
            f"FP8 weights in blocks of {str(block)[:80]} with {activations} activations are not "
            f"supported; supported: [{BLOCK}, {BLOCK}] with dynamic ones; take another checkpoint"
        )
    left_out = [
        *names(config, "ignored_layers"),
        *names(config, "modules_to_not_convert"),
        "lm_head",
    ]
    is_plain = Patterns().matcher(left_out, parts=True)
    return lambda name: PLAIN if is_plain(name) else f"w8a8 float8_e4m3fn {kind}"
