"""Seed-OSS (ByteDance): Llama with biases on queries, keys and values, and a separate setting for
the bias of the output projection.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ..config.model import ModelConfig
from ..layers.self_attention import SelfAttention
from .causal_lm import GGUF_BLOCK, CausalLM, gguf_names
from .llama import LlamaConfig, LlamaForCausalLM

ARCHITECTURE = "SeedOssForCausalLM"
MODEL_TYPE = "seed_oss"
GGUF_ARCHITECTURE = "seed_oss"


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedOssConfig(LlamaConfig):
    attention_bias: bool = True
    attention_out_bias: bool = False


class SeedOssForCausalLM(LlamaForCausalLM):
    config_class: ClassVar[type[ModelConfig]] = SeedOssConfig
    config_defaults: ClassVar = {
        **CausalLM.config_defaults,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524288,
    }
    gguf_names: ClassVar[dict[str, str]] = gguf_names(
        {**GGUF_BLOCK, "post_attention_norm": "post_attention_layernorm"}
    )
    gguf_interleaves_heads = False

    @staticmethod
    def gguf_members(get: Callable[..., Any], tensors: Collection[str]) -> dict[str, Any]:
        return {
            **LlamaForCausalLM.gguf_members(get, tensors),
            "attention_out_bias": "blk.0.attn_output.bias" in tensors,
        }

    def make_attention(self, layer: int) -> nn.Module:
        config = self.config
        biases = config.attention_bias, config.attention_out_bias
        return SelfAttention(config, layer, qkv_bias=biases[0], o_bias=biases[1])
