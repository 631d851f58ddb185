"""Ministral 3 (Mistral AI): Mistral with queries that are scaled as in Llama 4, by the logarithm of
how many original contexts precede them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ..config.model import ModelConfig
from ..config.rope import number
from ..layers.rotary import Rotations
from ..layers.self_attention import SelfAttention
from .mistral import MistralForCausalLM

ARCHITECTURE = "Ministral3ForCausalLM"
MODEL_TYPE = "ministral3"
GGUF_ARCHITECTURE = "mistral3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ministral3Config(ModelConfig):
    """`llama_4_scaling_beta` is a member of rope_parameters. If it is None, queries are not
    scaled.
    """

    llama_4_scaling_beta: float | None = None


class QueryScale(nn.Module):
    """Maps positions [T] int64 to factors of queries [T, 1, 1]."""

    def __init__(self, beta: float, original: float) -> None:
        super().__init__()
        self.beta, self.original, self.dtype = beta, original, torch.get_default_dtype()

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        times = torch.floor(positions / self.original)
        scale: torch.Tensor = 1 + self.beta * torch.log(1 + times)
        return scale.to(self.dtype)[:, None, None]


class Ministral3Attention(SelfAttention):
    """Its second table is a `QueryScale`."""

    def turn(self, heads: torch.Tensor, rotations: Rotations) -> torch.Tensor:
        q, k = super().turn(heads, rotations).tensor_split([self.num_heads], dim=1)
        scale: Any = rotations[1]
        return torch.cat((q * scale, k), dim=1)


class Ministral3ForCausalLM(MistralForCausalLM):
    config_class: ClassVar[type[ModelConfig]] = Ministral3Config
    config_defaults: ClassVar = {
        **MistralForCausalLM.config_defaults,
        "max_position_embeddings": 262144,
        "sliding_window": None,
    }

    @staticmethod
    def gguf_members(get: Callable[..., Any], tensors: Collection[str]) -> dict[str, Any]:
        beta = get("attention.temperature_scale", 0.0, float)
        return {"rope_parameters": {"llama_4_scaling_beta": beta}} if beta else {}

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        rope = getattr(config, "rope_parameters", None) or {}
        beta = rope.get("llama_4_scaling_beta") if isinstance(rope, dict) else None
        if beta is not None:
            beta = number("llama_4_scaling_beta", beta)
        return {**MistralForCausalLM.config_fields(config), "llama_4_scaling_beta": beta}

    def make_rotaries(self) -> Sequence[nn.Module]:
        config, tables = self.config, super().make_rotaries()
        if config.llama_4_scaling_beta is None:
            return tables
        original = config.rope_scaling.get("original_max_position_embeddings")
        original = number(
            "original_max_position_embeddings", original or config.max_position_embeddings
        )
        if original <= 0:
            raise ValueError(
                f"original_max_position_embeddings must be more than 0, got {original}; download "
                "the model again"
            )
        return [*tables, QueryScale(config.llama_4_scaling_beta, original)]

    def make_attention(self, layer: int) -> nn.Module:
        grows = self.config.llama_4_scaling_beta is not None
        return (Ministral3Attention if grows else SelfAttention)(self.config, layer)
