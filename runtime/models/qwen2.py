"""Qwen2 (arXiv:2407.10671): Llama with biases on queries, keys and values, and a sliding window in
some layers.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from ..config.model import sliding_windows
from ..layers.self_attention import SelfAttention
from .causal_lm import CausalLM

ARCHITECTURE = "Qwen2ForCausalLM"
MODEL_TYPE = "qwen2"
GGUF_ARCHITECTURE = "qwen2"


class Qwen2ForCausalLM(CausalLM):
    """The model has these biases, independent of config.json."""

    config_defaults: ClassVar = {
        **CausalLM.config_defaults,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    }

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        window = config.sliding_window if config.use_sliding_window else None
        return {"windows": sliding_windows(config, window, config.max_window_layers)}

    def make_attention(self, layer: int) -> nn.Module:
        return SelfAttention(self.config, layer, qkv_bias=True)
