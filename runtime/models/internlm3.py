"""InternLM3 (Shanghai AI Laboratory): Llama with biases on queries, keys and values, or on the
other linear layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from ..config.model import ModelConfig
from ..layers.mlp import GatedMLP
from ..layers.self_attention import SelfAttention
from .causal_lm import CausalLM

ARCHITECTURE = "InternLM3ForCausalLM"
MODEL_TYPE = "internlm3"


@dataclass(frozen=True, slots=True, kw_only=True)
class InternLM3Config(ModelConfig):
    qkv_bias: bool = False
    bias: bool = False


class InternLM3ForCausalLM(CausalLM):
    """Transformers has no code for it, and llama.cpp names it a Llama."""

    config_class: ClassVar[type[ModelConfig]] = InternLM3Config
    config_defaults: ClassVar = {
        **CausalLM.config_defaults,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
    }

    def make_attention(self, layer: int) -> nn.Module:
        config = self.config
        return SelfAttention(config, layer, qkv_bias=config.qkv_bias, o_bias=config.bias)

    def make_mlp(self, layer: int) -> nn.Module:
        config = self.config
        sizes = config.hidden_size, config.intermediate_size
        return GatedMLP(*sizes, bias=config.bias, activation=config.activation)
