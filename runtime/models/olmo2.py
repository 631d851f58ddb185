"""OLMo 2 (arXiv:2501.00656): norms after attention and feed-forward instead of before, and a norm
over all heads of queries and one of keys.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from ...kernels.step_parts import LayerParts, part_of
from ..config.model import ModelConfig, patterned_windows
from ..layers.norm import AllHeadsRMSNorm, RMSNorm
from ..layers.rotary import Rotary, Rotations
from ..layers.self_attention import SelfAttention
from .causal_lm import GGUF_BLOCK, CausalLM, gguf_names

ARCHITECTURE = "Olmo2ForCausalLM"
MODEL_TYPE = "olmo2"
GGUF_ARCHITECTURE = "olmo2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Olmo2Config(ModelConfig):
    """`rope_local_base_freq` is theta of layers with a window. None: the same as of other
    layers.
    """

    attention_bias: bool = False
    rope_local_base_freq: float | None = None


class Olmo2Layer(nn.Module):
    def __init__(self, config: ModelConfig, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = mlp
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rotations: Rotations
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = x if residual is None else x + residual
        residual = residual + self.post_attention_layernorm(self.self_attn(residual, rotations))
        return self.post_feedforward_layernorm(self.mlp(residual)), residual

    def step_parts(self) -> LayerParts:
        return LayerParts(
            part_of(self.self_attn),
            part_of(self.mlp),
            after_attention=part_of(self.post_attention_layernorm),
            after_feed_forward=part_of(self.post_feedforward_layernorm),
        )


class Olmo2ForCausalLM(CausalLM):
    """GGUF files of OLMo 3 have the name of this model, and windows."""

    config_class: ClassVar[type[ModelConfig]] = Olmo2Config
    config_defaults: ClassVar = {**CausalLM.config_defaults, "rms_norm_eps": 1e-5}
    gguf_names: ClassVar[dict[str, str]] = gguf_names(
        {
            **GGUF_BLOCK,
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        }
    )

    gguf_keys: ClassVar[dict[str, str]] = {
        "attention.sliding_window_pattern": "sliding_window_pattern"
    }

    @staticmethod
    def gguf_members(get: Callable[..., Any], tensors: Collection[str]) -> dict[str, Any]:
        return {"gguf_window": get("attention.sliding_window", 0)}

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        window = getattr(config, "gguf_window", 0)
        return {"windows": patterned_windows(config, window, 4)} if window else {}

    def make_rotaries(self) -> Sequence[nn.Module]:
        """Return the tables. Frequencies are scaled only in layers with full attention."""
        config = self.config
        theta = config.rope_local_base_freq or config.rope_theta
        local = replace(config, rope_theta=theta, rope_type="default", rope_scaling={})
        return [Rotary(config), Rotary(local)] if any(config.windows) else [Rotary(config)]

    def make_layer(self, layer: int) -> nn.Module:
        return Olmo2Layer(self.config, self.make_attention(layer), self.make_mlp(layer))

    def make_attention(self, layer: int) -> nn.Module:
        config = self.config
        return SelfAttention(
            config,
            layer,
            qkv_bias=config.attention_bias,
            o_bias=config.attention_bias,
            q_norm=AllHeadsRMSNorm(config.num_heads * config.head_dim, config.norm_eps),
            k_norm=AllHeadsRMSNorm(config.num_kv_heads * config.head_dim, config.norm_eps),
            rotary=0 if config.windows[layer] is None else 1,
        )
