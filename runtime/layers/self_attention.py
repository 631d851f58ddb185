"""The attention layer of decoders like Llama's."""

from __future__ import annotations

import torch
from torch import nn

from ...kernels import ops
from ...kernels.attention import KVLayout
from ..model_config import ModelConfig
from .attention import attention
from .linear import FusedLinear, Linear
from .norm import RMSNorm
from .rotary import Rotation


class SelfAttention(nn.Module):
    """Grouped-query attention with rotary positions; `qk_norm` normalises each head's query and key
    (Qwen3).
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.qkv_proj = FusedLinear(
            config.hidden_size,
            {"q_proj": query, "k_proj": key, "v_proj": key},
            bias=config.qkv_bias,
        )
        self.o_proj = Linear(query, config.hidden_size, bias=config.o_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def kv_layout(self, dtype: torch.dtype, window: int | None) -> KVLayout:
        """What the layer keeps of a token."""
        heads = self.num_heads, self.num_kv_heads, self.head_dim
        return KVLayout.of_heads(*heads, dtype, window=window)

    def forward(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        heads: torch.Tensor = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is None or self.k_norm is None:
            turned, v = heads.tensor_split([self.num_heads + self.num_kv_heads], dim=1)
        else:
            q, k, v = heads.tensor_split(
                [self.num_heads, self.num_heads + self.num_kv_heads], dim=1
            )
            turned = torch.cat((self.q_norm(q), self.k_norm(k)), dim=1)
        q, k = ops.rotary_embedding(turned, *rotation).tensor_split([self.num_heads], dim=1)
        output: torch.Tensor = self.o_proj(attention(q, k, v, self.layer))
        return output
