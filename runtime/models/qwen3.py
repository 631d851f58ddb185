"""Qwen3: Llama with normalised queries and keys, and a sliding window in some layers."""

from __future__ import annotations

from typing import Any

from ..model_config import sliding_windows
from .llama import LlamaForCausalLM

ARCHITECTURE = "Qwen3ForCausalLM"
MODEL_TYPE = "qwen3"
GGUF_ARCHITECTURE = "qwen3"


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Each head of queries and keys is normalised before the rotation."""

    gguf_interleaves_heads = False

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        biased = bool(config.attention_bias)
        windows = sliding_windows(config)
        return {"qkv_bias": biased, "o_bias": biased, "qk_norm": True, "windows": windows}
