"""SmolLM3 (Hugging Face): Llama in which every fourth layer uses no positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ..config.model import ModelConfig, sliding_windows
from ..layers.self_attention import SelfAttention
from .causal_lm import CausalLM
from .llama import LlamaConfig, LlamaForCausalLM

ARCHITECTURE = "SmolLM3ForCausalLM"
MODEL_TYPE = "smollm3"
GGUF_ARCHITECTURE = "smollm3"


@dataclass(frozen=True, slots=True, kw_only=True)
class SmolLM3Config(LlamaConfig):
    """`no_rope_layers` has a number for each layer, 0 if it uses no positions."""

    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: int = 4


class SmolLM3ForCausalLM(LlamaForCausalLM):
    config_class: ClassVar[type[ModelConfig]] = SmolLM3Config
    config_defaults: ClassVar = {
        **CausalLM.config_defaults,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "rope_theta": 2000000.0,
    }

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        count, every = config.num_hidden_layers, config.no_rope_layer_interval
        turned = config.no_rope_layers
        if turned is None and every < 1:
            raise ValueError("no_rope_layer_interval must be more than 0; download the model again")
        if turned is None:
            turned = [int((layer + 1) % every != 0) for layer in range(count)]
        if len(turned) != count:
            raise ValueError(
                "no_rope_layers must have an entry for each layer; download the model again"
            )
        window = config.sliding_window if config.use_sliding_window else None
        if getattr(config, "layer_types", None) is None:
            windows = [None if has_positions else window for has_positions in turned]
        else:
            windows = sliding_windows(config, window, 0)
        return {"no_rope_layers": turned, "windows": windows}

    def make_attention(self, layer: int) -> nn.Module:
        config = self.config
        return SelfAttention(
            config,
            layer,
            qkv_bias=config.attention_bias,
            o_bias=config.attention_bias,
            rotary=0 if config.no_rope_layers[layer] else None,
        )
