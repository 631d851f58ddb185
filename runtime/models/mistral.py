"""Mistral (arXiv:2310.06825): Llama without biases, optionally with a sliding window in all
layers.
"""

from __future__ import annotations

from typing import Any, ClassVar

from ..config.model import ModelConfig, sliding_windows
from .causal_lm import CausalLM
from .llama import LlamaForCausalLM

ARCHITECTURE = "MistralForCausalLM"
MODEL_TYPE = "mistral"
# GGUF files name it llama.


class MistralForCausalLM(LlamaForCausalLM):
    """The model has no biases, independent of config.json."""

    config_class: ClassVar[type[ModelConfig]] = ModelConfig
    config_defaults: ClassVar = {
        **CausalLM.config_defaults,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    }
    make_attention = CausalLM.make_attention
    make_mlp = CausalLM.make_mlp

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        return {"windows": sliding_windows(config, config.sliding_window, 0)}
