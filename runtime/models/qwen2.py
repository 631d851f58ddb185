"""Qwen2: Llama with biases on queries, keys and values, and a sliding window in some layers."""

from __future__ import annotations

from typing import Any, ClassVar

from ..model_config import sliding_windows
from .llama import CONFIG_DEFAULTS, LlamaForCausalLM

ARCHITECTURE = "Qwen2ForCausalLM"
MODEL_TYPE = "qwen2"
GGUF_ARCHITECTURE = "qwen2"


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Its biases are there whatever its config.json says."""

    gguf_interleaves_heads = False
    config_defaults: ClassVar = {
        **CONFIG_DEFAULTS,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    }

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        window = config.sliding_window if config.use_sliding_window else None
        windows = sliding_windows(config, window, config.max_window_layers)
        return {"qkv_bias": True, "windows": windows}
