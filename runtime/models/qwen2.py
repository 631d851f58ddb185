"""Qwen2: Llama with biases on queries, keys and values, and a sliding window in some layers."""

from __future__ import annotations

from typing import Any

from ..model_config import sliding_windows
from .llama import LlamaForCausalLM

ARCHITECTURE = "Qwen2ForCausalLM"
MODEL_TYPE = "qwen2"
GGUF_ARCHITECTURE = "qwen2"


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Its biases are there whatever its config.json says."""

    gguf_interleaves_heads = False

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        return {"qkv_bias": True, "windows": sliding_windows(config)}
