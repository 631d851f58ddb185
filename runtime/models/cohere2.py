"""Command R7B and Command A (Cohere): the layers of Command R. Three of four have a sliding window,
and those with full attention use no positions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, ClassVar

from torch import nn

from ..config.model import patterned_windows
from ..layers.self_attention import SelfAttention
from .cohere import CohereForCausalLM

ARCHITECTURE = "Cohere2ForCausalLM"
MODEL_TYPE = "cohere2"
GGUF_ARCHITECTURE = "cohere2"


class Cohere2ForCausalLM(CohereForCausalLM):
    config_defaults: ClassVar = {
        **CohereForCausalLM.config_defaults,
        "sliding_window": 4096,
        "rope_theta": 10000.0,
    }
    gguf_keys: ClassVar[dict[str, str]] = {
        **CohereForCausalLM.gguf_keys,
        "attention.sliding_window": "sliding_window",
        "attention.sliding_window_pattern": "sliding_window_pattern",
    }

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        windows = patterned_windows(config, config.sliding_window, 4)
        return {**CohereForCausalLM.config_fields(config), "windows": windows, "use_qk_norm": False}

    @staticmethod
    def gguf_members(get: Callable[..., Any], tensors: Collection[str]) -> dict[str, Any]:
        return {}

    def make_attention(self, layer: int) -> nn.Module:
        config = self.config
        return SelfAttention(
            config,
            layer,
            qkv_bias=config.attention_bias,
            o_bias=config.attention_bias,
            rotary=None if config.windows[layer] is None else 0,
            interleaved=True,
        )
