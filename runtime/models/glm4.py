"""GLM 4 (0414): norms before and after attention and feed-forward, as Gemma 2 has them, and half of
each head turned, in pairs that lie side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ..layers.linear import StoredTensor
from ..layers.norm import RMSNorm
from ..layers.rotary import Rotations
from ..layers.self_attention import SelfAttention
from ..model_config import ModelConfig
from .causal_lm import GGUF_BLOCK, CausalLM, gguf_names
from .phi3 import unfused_layers

ARCHITECTURE = "Glm4ForCausalLM"
MODEL_TYPE = "glm4"
GGUF_ARCHITECTURE = "glm4"


@dataclass(frozen=True, slots=True, kw_only=True)
class Glm4Config(ModelConfig):
    attention_bias: bool = True


class Glm4Layer(nn.Module):
    """`Gemma2Layer` under other names."""

    def __init__(self, config: ModelConfig, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = attention
        self.post_self_attn_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = mlp
        self.post_mlp_layernorm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rotations: Rotations
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = (
            (self.input_layernorm(x), x)
            if residual is None
            else self.input_layernorm.add(x, residual)
        )
        x = self.post_self_attn_layernorm(self.self_attn(x, rotations))
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.post_mlp_layernorm(self.mlp(x)), residual


class Glm4ForCausalLM(CausalLM):
    config_class: ClassVar[type[ModelConfig]] = Glm4Config
    config_defaults: ClassVar = {
        **CausalLM.config_defaults,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1.5625e-7,
        "partial_rotary_factor": 0.5,
    }
    takes_partial_rotary = True
    gguf_names: ClassVar[dict[str, str]] = gguf_names(
        {
            **GGUF_BLOCK,
            "ffn_up": "mlp.gate_up_proj",
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        }
    )

    @staticmethod
    def gguf_members(get: Callable[..., Any], tensors: Collection[str]) -> dict[str, Any]:
        biases = "blk.0.attn_q.bias", "blk.0.attn_qkv.bias"
        return {"attention_bias": any(name in tensors for name in biases)}

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
        return unfused_layers(config, tensors)

    gguf_tensors = checkpoint_tensors

    def make_layer(self, layer: int) -> nn.Module:
        return Glm4Layer(self.config, self.make_attention(layer), self.make_mlp(layer))

    def make_attention(self, layer: int) -> nn.Module:
        biased = self.config.attention_bias
        return SelfAttention(self.config, layer, qkv_bias=biased, interleaved=True)
