"""Gemma (arXiv:2403.08295): Llama with scaled embeddings, norms that multiply by the stored weight
plus 1, and GELU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ..config.model import ModelConfig
from ..layers.linear import StoredTensor
from ..layers.self_attention import SelfAttention
from .causal_lm import CausalLM
from .checkpoint import plus_one

ARCHITECTURE = "GemmaForCausalLM"
MODEL_TYPE = "gemma"
GGUF_ARCHITECTURE = "gemma"


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaConfig(ModelConfig):
    attention_bias: bool = False


def add_one_to_norms(tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
    """Add 1 to the weights of norms, as GGUF files already store them."""
    return plus_one(tensors, lambda name: name.endswith("norm.weight"))


class GemmaForCausalLM(CausalLM):
    """The activation is the tanh form of GELU, independent of config.json."""

    config_class: ClassVar[type[ModelConfig]] = GemmaConfig
    config_defaults: ClassVar = {
        **CausalLM.config_defaults,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        return {"activation": "gelu_pytorch_tanh"}

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
        return add_one_to_norms(tensors)

    def embedding_scale(self) -> float:
        # Rounded to the weights' dtype, which torch's default is while models are made.
        return torch.tensor(self.config.hidden_size**0.5, device="cpu").item()

    def make_attention(self, layer: int) -> nn.Module:
        biased = self.config.attention_bias
        return SelfAttention(self.config, layer, qkv_bias=biased, o_bias=biased)
