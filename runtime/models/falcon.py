"""Falcon (arXiv:2311.16867): multi-query attention in parallel with the feed-forward from one
LayerNorm (7B), grouped heads with a LayerNorm for each of the two (40B, 180B), or one after the
other (RW).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from ..config.model import ModelConfig
from ..layers.activation import ACTIVATIONS
from ..layers.alibi import alibi_slope
from ..layers.decoder import ParallelLayer
from ..layers.linear import StoredTensor
from ..layers.mlp import MLP
from ..layers.norm import LayerNorm
from ..layers.rotary import Rotations
from ..layers.self_attention import SelfAttention
from .bloom import MODULES, PARTS
from .causal_lm import GGUF_BLOCK, CausalLM, gguf_names
from .checkpoint import grouped_heads, renamed
from .phi3 import unfused_layers

ARCHITECTURE = "FalconForCausalLM"
MODEL_TYPE = "falcon"
GGUF_ARCHITECTURE = "falcon"


@dataclass(frozen=True, slots=True, kw_only=True)
class FalconConfig(ModelConfig):
    bias: bool = False
    parallel_attn: bool = True
    multi_query: bool = True
    new_decoder_architecture: bool = False
    num_ln_in_parallel_attn: int | None = None
    alibi: bool = False

    @property
    def has_two_norms(self) -> bool:
        """Whether parallel attention and feed-forward have a norm each."""
        return self.new_decoder_architecture and self.num_ln_in_parallel_attn in (None, 2)


class TwoNormLayer(ParallelLayer):
    """Attention and feed-forward in parallel, each with its own norm (Falcon 40B)."""

    def __init__(
        self, norm: nn.Module, mlp_norm: nn.Module, attention: nn.Module, mlp: nn.Module
    ) -> None:
        super().__init__(norm, attention, mlp)
        self.mlp_layernorm = mlp_norm

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rotations: Rotations
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DecoderLayer.forward`."""
        total = x if residual is None else x + residual
        attended = self.self_attn(self.input_layernorm(total), rotations)
        return attended + self.mlp(self.mlp_layernorm(total)), total


class FalconForCausalLM(CausalLM):
    """No GGUF file holds a model with ALiBi."""

    config_class: ClassVar[type[ModelConfig]] = FalconConfig
    config_defaults: ClassVar = {
        **CausalLM.config_defaults,
        "intermediate_size": 0,
        "hidden_act": "gelu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    config_names: ClassVar[dict[str, str]] = {
        "layer_norm_epsilon": "rms_norm_eps",
        "activation": "hidden_act",
        "num_kv_heads": "num_key_value_heads",
        "ffn_hidden_size": "intermediate_size",
    }
    gguf_names: ClassVar[dict[str, str]] = gguf_names({**GGUF_BLOCK, "attn_norm_2": "attn_norm_2"})

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        kv_heads = config.num_key_value_heads or config.num_attention_heads
        if not config.new_decoder_architecture:
            kv_heads = 1 if config.multi_query else config.num_attention_heads
        between = config.intermediate_size or 4 * config.hidden_size
        return {"num_kv_heads": kv_heads, "intermediate_size": between}

    @staticmethod
    def gguf_members(get: Callable[..., Any], tensors: Collection[str]) -> dict[str, Any]:
        has_two = "blk.0.attn_norm_2.weight" in tensors
        is_new = has_two or get("attention.head_count_kv", 1) > 1
        return {
            "bias": "blk.0.attn_qkv.bias" in tensors,
            "new_decoder_architecture": is_new,
            "num_ln_in_parallel_attn": 1 + has_two if is_new else None,
        }

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
        found = renamed(renamed(tensors, MODULES), PARTS)
        found = renamed(
            found, {r"\.ln_attn\.": ".input_layernorm.", r"\.ln_mlp\.": ".mlp_layernorm."}
        )
        heads = config.num_heads, config.num_kv_heads
        return unfused_layers(config, grouped_heads(found, "qkv_proj", *heads))

    @staticmethod
    def gguf_tensors(config: Any, tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
        """If there are two norms, the norm of attention comes second in GGUF files."""
        if config.has_two_norms:
            norms = {
                r"\.input_layernorm\.": ".mlp_layernorm.",
                r"\.attn_norm_2\.": ".input_layernorm.",
            }
            tensors = renamed(tensors, norms)
        return unfused_layers(config, tensors)

    def make_rotaries(self) -> Sequence[nn.Module]:
        return [] if self.config.alibi else super().make_rotaries()

    def make_norm(self) -> nn.Module:
        return LayerNorm(self.config.hidden_size, eps=self.config.norm_eps, bias=True)

    def make_layer(self, layer: int) -> nn.Module:
        config, attention, mlp = self.config, self.make_attention(layer), self.make_mlp(layer)
        if config.has_two_norms:
            return TwoNormLayer(self.make_norm(), self.make_norm(), attention, mlp)
        if config.parallel_attn or config.new_decoder_architecture:
            return ParallelLayer(self.make_norm(), attention, mlp)
        return super().make_layer(layer)

    def make_attention(self, layer: int) -> nn.Module:
        biased = self.config.bias
        attention = partial(SelfAttention, self.config, layer, qkv_bias=biased, o_bias=biased)
        return attention(rotary=None, slopes=self._slope) if self.config.alibi else attention()

    def _slope(self, head: int) -> float:
        """Return the ALiBi slope of a head. It is scaled like the scores."""
        scale: float = self.config.head_dim**-0.5
        return scale * alibi_slope(head, self.config.num_heads)

    def make_mlp(self, layer: int) -> nn.Module:
        config = self.config
        activation = ACTIVATIONS[config.activation]
        return MLP(config.hidden_size, config.intermediate_size, activation, bias=config.bias)
