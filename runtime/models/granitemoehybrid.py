"""Granite 4: Granite whose layers are Mamba 2's, with attention in a few, which mostly knows no
positions; the feed-forward layers are Granite's, or mixtures of experts beside one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ..layers.linear import StoredTensor
from ..layers.mamba2 import Mamba2Mixer, Mamba2Sizes
from ..layers.mlp import GatedMLP
from ..layers.moe import FusedMoE, Router, Routing, SparseMoE
from ..layers.norm import GatedRMSNorm
from ..layers.self_attention import SelfAttention
from ..loader.checkpoint import renamed, unfused
from ..loader.experts import MERGED, take_apart
from ..model_config import ModelConfig
from .granite import GraniteForCausalLM, GraniteLayer
from .hybrid import Mamba2Config, kinds_of_layers, mamba_fields

ARCHITECTURE = "GraniteMoeHybridForCausalLM"
MODEL_TYPE = "granitemoehybrid"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteMoeHybridConfig(Mamba2Config):
    attention_bias: bool = False
    embedding_multiplier: float = 1.0
    logits_scaling: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    layer_types: list[str] | None = None
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    shared_intermediate_size: int = 1024
    position_embedding_type: str | None = None

    def __post_init__(self) -> None:
        Mamba2Config.__post_init__(self)
        self.check_positive("shared_intermediate_size", "logits_scaling")


class GraniteMoeHybridForCausalLM(GraniteForCausalLM):
    config_class: ClassVar[type[ModelConfig]] = GraniteMoeHybridConfig
    config_defaults: ClassVar = {**GraniteForCausalLM.config_defaults, "intermediate_size": 11008}

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        # As older files call them.
        kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
        if isinstance(kinds, list):
            old = {"mamba": "linear_attention", "attention": "full_attention"}
            config.layer_types = [old.get(str(kind), kind) for kind in kinds]
        default = ["linear_attention"] * config.num_hidden_layers
        return {
            **kinds_of_layers(config, ("linear_attention", "full_attention"), default),
            **mamba_fields(config, config.mamba_expand * config.hidden_size),
        }

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        shared = ".mlp.shared_experts." if config.num_local_experts else ".mlp."
        names = {
            r"\.block_sparse_moe\.input_linear\.weight$": ".mlp.experts.gate_up_proj",
            r"\.block_sparse_moe\.output_linear\.weight$": ".mlp.experts.down_proj",
            r"\.block_sparse_moe\.router\.(layer\.)?": ".mlp.gate.",
            r"\.block_sparse_moe\.": ".mlp.",
            r"\.shared_mlp\.output_linear\.": f"{shared}down_proj.",
            r"\.shared_mlp\.": shared,
        }
        whole = renamed(tensors, names)
        size = config.shared_intermediate_size
        parts = unfused(whole, "input_linear", {"gate_proj": size, "up_proj": size})
        return take_apart(parts, MERGED)

    def make_layer(self, layer: int) -> nn.Module:
        config, mlp = self.config, self.make_mlp(layer)
        if config.layer_types[layer] == "full_attention":
            return GraniteLayer(config, self.make_attention(layer), mlp)
        sizes: Mamba2Sizes = config.mamba
        mixer = Mamba2Mixer(
            layer,
            config.hidden_size,
            sizes,
            GatedRMSNorm(sizes.inner, config.norm_eps, groups=sizes.groups),
            conv_bias=config.mamba_conv_bias,
            in_bias=config.mamba_proj_bias,
            out_bias=config.mamba_proj_bias,
        )
        return GraniteLayer(config, mixer, mlp, "mamba")

    def make_attention(self, layer: int) -> nn.Module:
        config = self.config
        return SelfAttention(
            config,
            layer,
            qkv_bias=config.attention_bias,
            o_bias=config.attention_bias,
            rotary=0 if config.position_embedding_type == "rope" else None,
            scale=config.attention_multiplier,
        )

    def make_mlp(self, layer: int) -> nn.Module:
        config = self.config
        size, activation = config.hidden_size, config.activation
        shared = GatedMLP(size, config.shared_intermediate_size, activation=activation)
        if config.num_local_experts == 0:
            return shared
        routing = Routing(config.num_local_experts, config.num_experts_per_tok)
        experts = FusedMoE(
            size, config.intermediate_size, config.num_local_experts, activation=activation
        )
        return SparseMoE(Router(size, routing), experts, shared)
