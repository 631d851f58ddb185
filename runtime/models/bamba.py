"""Bamba (IBM, Princeton, UIUC): Mamba 2 in most layers, attention that rotates half of each head in
a few, and feed-forward layers as in Llama.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ..config.model import ModelConfig
from ..layers.decoder import DecoderLayer
from ..layers.linear import StoredTensor
from ..layers.mlp import GatedMLP
from ..layers.self_attention import SelfAttention
from .causal_lm import CausalLM
from .checkpoint import renamed
from .hybrid import Mamba2Config, kinds_of_layers, mamba2_mixer, mamba_fields

ARCHITECTURE = "BambaForCausalLM"
MODEL_TYPE = "bamba"


@dataclass(frozen=True, slots=True, kw_only=True)
class BambaConfig(Mamba2Config):
    attn_layer_indices: list[int] | None = None
    layer_types: list[str] | None = None
    attention_bias: bool = False
    mlp_bias: bool = False


class BambaForCausalLM(CausalLM):
    config_class: ClassVar[type[ModelConfig]] = BambaConfig
    config_defaults: ClassVar = {
        **CausalLM.config_defaults,
        "num_key_value_heads": 8,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
    }
    takes_partial_rotary = True

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        attending = config.attn_layer_indices or []
        default = [
            "full_attention" if layer in attending else "linear_attention"
            for layer in range(config.num_hidden_layers)
        ]
        return {
            **kinds_of_layers(config, ("linear_attention", "full_attention"), default),
            **mamba_fields(config, config.mamba_expand * config.hidden_size),
        }

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        names = {
            r"\.feed_forward\.": ".mlp.",
            r"\.pre_ff_layernorm\.": ".post_attention_layernorm.",
            r"^model\.final_layernorm\.": "model.norm.",
        }
        return renamed(tensors, names)

    def make_layer(self, layer: int) -> nn.Module:
        config = self.config
        mlp = GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            bias=config.mlp_bias,
            activation=config.activation,
        )
        if config.layer_types[layer] == "full_attention":
            bias = config.attention_bias
            return DecoderLayer(
                config, SelfAttention(config, layer, qkv_bias=bias, o_bias=bias), mlp
            )
        return DecoderLayer(config, mamba2_mixer(config, layer), mlp, "mamba")
