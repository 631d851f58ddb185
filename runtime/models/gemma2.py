"""Gemma 2 (arXiv:2408.00118): norms before and after attention and feed-forward, soft caps of
scores and logits, and a sliding window in every other layer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ...kernels.step_parts import LayerParts, part_of
from ..config.model import ModelConfig, patterned_windows
from ..layers.activation import soft_cap
from ..layers.norm import RMSNorm
from ..layers.rotary import Rotations
from ..layers.self_attention import SelfAttention
from .causal_lm import GGUF_BLOCK, gguf_names
from .gemma import GemmaForCausalLM

ARCHITECTURE = "Gemma2ForCausalLM"
MODEL_TYPE = "gemma2"
GGUF_ARCHITECTURE = "gemma2"
_OF_27B = 46  # Layers of the model of 27B, whose queries are not scaled by the head size.


# Names of the modules of `Gemma2Layer` in GGUF files.
GGUF_SANDWICH = {
    **GGUF_BLOCK,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma2Config(ModelConfig):
    attention_bias: bool = False
    query_pre_attn_scalar: float = 256.0
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        self.check_positive(
            "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"
        )


class Gemma2Layer(nn.Module):
    """A layer that also normalises the results of attention and feed-forward before they
    are added.
    """

    def __init__(self, config: ModelConfig, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.pre_feedforward_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = mlp
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rotations: Rotations
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = (
            (self.input_layernorm(x), x)
            if residual is None
            else self.input_layernorm.add(x, residual)
        )
        x = self.post_attention_layernorm(self.self_attn(x, rotations))
        x, residual = self.pre_feedforward_layernorm.add(x, residual)
        return self.post_feedforward_layernorm(self.mlp(x)), residual

    def step_parts(self) -> LayerParts:
        return LayerParts(
            part_of(self.self_attn),
            part_of(self.mlp),
            part_of(self.input_layernorm),
            part_of(self.post_attention_layernorm),
            part_of(self.pre_feedforward_layernorm),
            part_of(self.post_feedforward_layernorm),
        )


class Gemma2ForCausalLM(GemmaForCausalLM):
    config_class: ClassVar[type[ModelConfig]] = Gemma2Config
    config_defaults: ClassVar = {
        **GemmaForCausalLM.config_defaults,
        "num_key_value_heads": 4,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 4096,
    }
    gguf_names: ClassVar[dict[str, str]] = gguf_names(GGUF_SANDWICH)
    gguf_keys: ClassVar[dict[str, str]] = {
        "attention.sliding_window": "sliding_window",
        "attention.sliding_window_pattern": "sliding_window_pattern",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    }

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        return {"windows": patterned_windows(config, config.sliding_window, 2)}

    @staticmethod
    def gguf_members(get: Callable[..., Any], tensors: Collection[str]) -> dict[str, Any]:
        """Return the scale of queries, which files do not hold, as llama.cpp chooses it."""
        return {"query_pre_attn_scalar": query_scalar(get, _OF_27B)}

    def make_layer(self, layer: int) -> nn.Module:
        return Gemma2Layer(self.config, self.make_attention(layer), self.make_mlp(layer))

    def make_attention(self, layer: int) -> nn.Module:
        config = self.config
        return SelfAttention(
            config,
            layer,
            qkv_bias=config.attention_bias,
            o_bias=config.attention_bias,
            scale=config.query_pre_attn_scalar**-0.5,
            softcap=config.attn_logit_softcapping,
        )

    def finish_logits(self, logits: torch.Tensor) -> torch.Tensor:
        return soft_cap(logits, self.config.final_logit_softcapping)


def query_scalar(get: Callable[..., Any], layers_of_27b: int) -> float:
    """Return `query_pre_attn_scalar` for a GGUF file: the head size, or hidden size / heads in the
    model of 27B.
    """
    each = get("embedding_length") // max(get("attention.head_count"), 1)
    is_27b = get("block_count") == layers_of_27b
    return float(each if is_27b else get("attention.key_length", each))
