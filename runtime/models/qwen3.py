"""Qwen3 (arXiv:2505.09388): Llama with normalised queries and keys, and a sliding window in some
layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ..config.model import ModelConfig
from ..layers.norm import RMSNorm
from ..layers.self_attention import SelfAttention
from .qwen2 import Qwen2ForCausalLM

ARCHITECTURE = "Qwen3ForCausalLM"
MODEL_TYPE = "qwen3"
GGUF_ARCHITECTURE = "qwen3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Config(ModelConfig):
    attention_bias: bool = False


class Qwen3ForCausalLM(Qwen2ForCausalLM):
    """Each head of queries and keys is normalised before the rotation."""

    config_class: ClassVar[type[ModelConfig]] = Qwen3Config
    config_defaults: ClassVar = {**Qwen2ForCausalLM.config_defaults, "head_dim": 128}

    @staticmethod
    def gguf_members(get: Callable[..., Any], tensors: Collection[str]) -> dict[str, Any]:
        return {"attention_bias": "blk.0.attn_q.bias" in tensors}

    def make_attention(self, layer: int) -> nn.Module:
        config = self.config
        return SelfAttention(
            config,
            layer,
            qkv_bias=config.attention_bias,
            o_bias=config.attention_bias,
            q_norm=RMSNorm(config.head_dim, config.norm_eps),
            k_norm=RMSNorm(config.head_dim, config.norm_eps),
        )
