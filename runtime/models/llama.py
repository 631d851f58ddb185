"""Llama (arXiv:2302.13971): the layers that Mistral, Qwen2 and Qwen3 have too."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ..config.model import ModelConfig
from ..layers.mlp import GatedMLP
from ..layers.self_attention import SelfAttention
from .causal_lm import CausalLM

ARCHITECTURE = "LlamaForCausalLM"
MODEL_TYPE = "llama"
GGUF_ARCHITECTURE = "llama"


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(ModelConfig):
    attention_bias: bool = False
    mlp_bias: bool = False


class LlamaForCausalLM(CausalLM):
    """Either all linear layers of a kind have biases, or none has."""

    config_class: ClassVar[type[ModelConfig]] = LlamaConfig
    gguf_interleaves_heads = True

    @staticmethod
    def fits_gguf(get: Callable[..., Any]) -> bool:
        return not get("expert_count", 0)

    @staticmethod
    def gguf_members(get: Callable[..., Any], tensors: Collection[str]) -> dict[str, Any]:
        return {
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        }

    def make_attention(self, layer: int) -> nn.Module:
        biased = self.config.attention_bias
        return SelfAttention(self.config, layer, qkv_bias=biased, o_bias=biased)

    def make_mlp(self, layer: int) -> nn.Module:
        config = self.config
        sizes = config.hidden_size, config.intermediate_size
        return GatedMLP(*sizes, bias=config.mlp_bias, activation=config.activation)
