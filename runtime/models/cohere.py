"""Command R (Cohere): attention and feed-forward computed in parallel from one LayerNorm, rotary
pairs side by side, and scaled logits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ..config.model import ModelConfig
from ..layers.decoder import ParallelLayer
from ..layers.norm import LayerNorm
from ..layers.self_attention import SelfAttention
from .causal_lm import CausalLM

ARCHITECTURE = "CohereForCausalLM"
MODEL_TYPE = "cohere"
GGUF_ARCHITECTURE = "command-r"


@dataclass(frozen=True, slots=True, kw_only=True)
class CohereConfig(ModelConfig):
    attention_bias: bool = False
    use_qk_norm: bool = False
    logit_scale: float = 0.0625
    layer_norm_eps: float = 1e-5


class CohereForCausalLM(CausalLM):
    config_class: ClassVar[type[ModelConfig]] = CohereConfig
    config_defaults: ClassVar = {
        **CausalLM.config_defaults,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "rope_theta": 500000.0,
    }
    gguf_keys: ClassVar[dict[str, str]] = {
        "logit_scale": "logit_scale",
        "attention.layer_norm_epsilon": "layer_norm_eps",
    }

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        return {"norm_eps": float(config.layer_norm_eps)}

    @staticmethod
    def gguf_members(get: Callable[..., Any], tensors: Collection[str]) -> dict[str, Any]:
        return {"use_qk_norm": "blk.0.attn_q_norm.weight" in tensors}

    def make_norm(self) -> nn.Module:
        return LayerNorm(self.config.hidden_size, eps=self.config.norm_eps)

    def make_layer(self, layer: int) -> nn.Module:
        return ParallelLayer(self.make_norm(), self.make_attention(layer), self.make_mlp(layer))

    def make_attention(self, layer: int) -> nn.Module:
        config = self.config
        q_norm, k_norm = (
            LayerNorm(heads, config.head_dim, eps=config.norm_eps) if config.use_qk_norm else None
            for heads in (config.num_heads, config.num_kv_heads)
        )
        return SelfAttention(
            config,
            layer,
            qkv_bias=config.attention_bias,
            o_bias=config.attention_bias,
            q_norm=q_norm,
            k_norm=k_norm,
            interleaved=True,
        )

    def finish_logits(self, logits: torch.Tensor) -> torch.Tensor:
        finished: torch.Tensor = logits * self.config.logit_scale
        return finished
