"""Granite (IBM): Llama with multipliers of the embeddings, of the results of layers, of scores and
of logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ...kernels.step_parts import LayerParts
from ..config.model import ModelConfig
from ..layers.decoder import DecoderLayer
from ..layers.rotary import Rotations
from ..layers.self_attention import SelfAttention
from .llama import LlamaConfig, LlamaForCausalLM

ARCHITECTURE = "GraniteForCausalLM"
MODEL_TYPE = "granite"
GGUF_ARCHITECTURE = "granite"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteConfig(LlamaConfig):
    embedding_multiplier: float = 1.0
    logits_scaling: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        self.check_positive("logits_scaling")


class GraniteLayer(DecoderLayer):
    """A layer whose results are multiplied. `config` is a `GraniteConfig`."""

    def __init__(
        self, config: Any, attention: nn.Module, mlp: nn.Module, name: str = "self_attn"
    ) -> None:
        super().__init__(config, attention, mlp, name)
        self.multiplier: float = config.residual_multiplier

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rotations: Rotations
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = (
            (self.input_layernorm(x), x)
            if residual is None
            else self.input_layernorm.add(x, residual)
        )
        x = getattr(self, self.mixer)(x, rotations) * self.multiplier
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x) * self.multiplier, residual

    def step_parts(self) -> LayerParts:
        return super().step_parts()._replace(multiplier=self.multiplier)


class GraniteForCausalLM(LlamaForCausalLM):
    config_class: ClassVar[type[ModelConfig]] = GraniteConfig
    gguf_keys: ClassVar[dict[str, str]] = {
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "attention.scale": "attention_multiplier",
        "logit_scale": "logits_scaling",
    }

    def embedding_scale(self) -> float:
        scale: float = self.config.embedding_multiplier
        return scale

    def make_layer(self, layer: int) -> nn.Module:
        return GraniteLayer(self.config, self.make_attention(layer), self.make_mlp(layer))

    def make_attention(self, layer: int) -> nn.Module:
        config = self.config
        return SelfAttention(
            config,
            layer,
            qkv_bias=config.attention_bias,
            o_bias=config.attention_bias,
            scale=config.attention_multiplier,
        )

    def finish_logits(self, logits: torch.Tensor) -> torch.Tensor:
        finished: torch.Tensor = logits / self.config.logits_scaling
        return finished
