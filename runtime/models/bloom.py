"""Bloom (arXiv:2211.05100): normalised embeddings, LayerNorms with biases, and ALiBi in place of
positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from ..config.model_registry import UnsupportedError
from ..layers.activation import ACTIVATIONS
from ..layers.alibi import alibi_slope
from ..layers.decoder import Decoder
from ..layers.linear import StoredTensor
from ..layers.mlp import MLP
from ..layers.norm import LayerNorm
from ..layers.self_attention import SelfAttention
from .causal_lm import GGUF_BLOCK, CausalLM, gguf_names
from .checkpoint import grouped_heads, renamed
from .phi3 import unfused_layers

ARCHITECTURE = "BloomForCausalLM"
MODEL_TYPE = "bloom"
GGUF_ARCHITECTURE = "bloom"


MODULES = {
    r"^(transformer\.)?word_embeddings_layernorm\.": "model.embedding_norm.",
    r"^(transformer\.)?word_embeddings\.": "model.embed_tokens.",
    r"^(transformer\.)?ln_f\.": "model.norm.",
    r"^(transformer\.)?h\.": "model.layers.",
}
PARTS = {
    r"\.self_attention\.query_key_value\.": ".self_attn.qkv_proj.",
    r"\.self_attention\.dense\.": ".self_attn.o_proj.",
    r"\.dense_h_to_4h\.": ".up_proj.",
    r"\.dense_4h_to_h\.": ".down_proj.",
}


class BloomDecoder(Decoder):
    def __init__(self, *parts: Any, embedding_norm: nn.Module) -> None:
        super().__init__(*parts)
        self.embedding_norm = embedding_norm

    def embed(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.embedding_norm(super().embed(input_ids, positions))
        return embedded


class BloomForCausalLM(CausalLM):
    config_defaults: ClassVar = {
        **CausalLM.config_defaults,
        "intermediate_size": 0,
        "hidden_act": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "apply_residual_connection_post_layernorm": False,
    }
    config_names: ClassVar[dict[str, str]] = {
        "n_embed": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "seq_length": "max_position_embeddings",
        "layer_norm_epsilon": "rms_norm_eps",
    }
    gguf_names: ClassVar[dict[str, str]] = {
        **gguf_names(GGUF_BLOCK),
        "token_embd_norm": "model.embedding_norm",
    }

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        if config.apply_residual_connection_post_layernorm:
            raise UnsupportedError(
                "apply_residual_connection_post_layernorm is not supported; choose another model"
            )
        return {
            "num_kv_heads": config.num_attention_heads,
            "intermediate_size": 4 * config.hidden_size,
        }

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
        found = renamed(renamed(tensors, MODULES), PARTS)
        return unfused_layers(config, grouped_heads(found, "qkv_proj", *[config.num_heads] * 2))

    @staticmethod
    def gguf_tensors(config: Any, tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
        return unfused_layers(config, tensors)

    def make_decoder(self) -> Decoder:
        layers = map(self.make_layer, range(self.config.num_layers))
        norms = self.make_norm(), self.make_norm()
        return BloomDecoder(self.config, layers, norms[0], [], embedding_norm=norms[1])

    def make_norm(self) -> nn.Module:
        return LayerNorm(self.config.hidden_size, eps=self.config.norm_eps, bias=True)

    def make_attention(self, layer: int) -> nn.Module:
        slopes = partial(alibi_slope, heads=self.config.num_heads)
        return SelfAttention(
            self.config, layer, qkv_bias=True, o_bias=True, rotary=None, slopes=slopes
        )

    def make_mlp(self, layer: int) -> nn.Module:
        config = self.config
        activation = ACTIVATIONS[config.activation]
        return MLP(config.hidden_size, config.intermediate_size, activation, bias=True)
