"""Qwen3: Llama with normalised queries and keys, and a sliding window in some layers."""

from __future__ import annotations

from typing import Any, ClassVar

from .llama import LlamaForCausalLM
from .qwen2 import Qwen2ForCausalLM

ARCHITECTURE = "Qwen3ForCausalLM"
MODEL_TYPE = "qwen3"
GGUF_ARCHITECTURE = "qwen3"


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Each head of queries and keys is normalised before the rotation."""

    gguf_interleaves_heads = False
    config_defaults: ClassVar = {
        **Qwen2ForCausalLM.config_defaults,
        "head_dim": 128,
        "attention_bias": False,
    }

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        biased = bool(config.attention_bias)
        fields = Qwen2ForCausalLM.config_fields(config)
        return {**fields, "qkv_bias": biased, "o_bias": biased, "qk_norm": True}
