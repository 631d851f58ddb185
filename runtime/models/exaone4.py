"""EXAONE 4 (arXiv:2507.11407): the layers of OLMo 2 with a norm of each head. In models with
sliding windows, layers with full attention use no positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ..config.model import ModelConfig, patterned_windows
from ..layers.norm import RMSNorm
from ..layers.self_attention import SelfAttention
from .causal_lm import CausalLM
from .olmo2 import Olmo2ForCausalLM, Olmo2Layer

ARCHITECTURE = "Exaone4ForCausalLM"
MODEL_TYPE = "exaone4"
GGUF_ARCHITECTURE = "exaone4"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exaone4Config(ModelConfig):
    """If `sliding_window` is None, all layers have full attention with positions."""

    sliding_window: int | None = 4096


class Exaone4ForCausalLM(CausalLM):
    config_class: ClassVar[type[ModelConfig]] = Exaone4Config
    config_defaults: ClassVar = {
        **CausalLM.config_defaults,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
    }
    gguf_names: ClassVar[dict[str, str]] = Olmo2ForCausalLM.gguf_names
    gguf_keys: ClassVar[dict[str, str]] = {
        "attention.sliding_window": "sliding_window",
        **Olmo2ForCausalLM.gguf_keys,
    }

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        if config.sliding_window is None:
            return {}
        return {"windows": patterned_windows(config, config.sliding_window, 4)}

    def make_layer(self, layer: int) -> nn.Module:
        return Olmo2Layer(self.config, self.make_attention(layer), self.make_mlp(layer))

    def make_attention(self, layer: int) -> nn.Module:
        config = self.config
        has_positions = config.sliding_window is None or config.windows[layer] is not None
        return SelfAttention(
            config,
            layer,
            q_norm=RMSNorm(config.head_dim, config.norm_eps),
            k_norm=RMSNorm(config.head_dim, config.norm_eps),
            rotary=0 if has_positions else None,
        )
