"""Granite 4 (IBM): Granite with Mamba 2 in most layers, and attention, mostly without positions, in
a few. Feed-forward layers are those of Granite, or mixtures of experts with a shared expert.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ..config.model import ModelConfig
from ..layers.linear import StoredTensor
from ..layers.mlp import GatedMLP
from ..layers.moe import FusedMoE, Router, Routing, SparseMoE
from ..layers.self_attention import SelfAttention
from .causal_lm import GGUF_BLOCK, gguf_names
from .checkpoint import from_llama_cpp, renamed, unfused
from .experts import MERGED, take_apart
from .granite import GraniteForCausalLM, GraniteLayer
from .hybrid import (
    GGUF_MAMBA,
    GGUF_MAMBA_KEYS,
    Mamba2Config,
    kinds_in_gguf,
    kinds_of_layers,
    mamba2_mixer,
    mamba_fields,
)
from .qwen3_moe import GGUF_EXPERTS

ARCHITECTURE = "GraniteMoeHybridForCausalLM"
MODEL_TYPE = "granitemoehybrid"
GGUF_ARCHITECTURE = "granitehybrid"


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

    gguf_names: ClassVar[dict[str, str]] = gguf_names(
        {
            **GGUF_BLOCK,
            **GGUF_MAMBA,
            **GGUF_EXPERTS,
            "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
            "ffn_up_shexp": "mlp.shared_experts.up_proj",
            "ffn_down_shexp": "mlp.shared_experts.down_proj",
        }
    )
    gguf_keys: ClassVar[dict[str, str]] = {
        **GraniteForCausalLM.gguf_keys,
        **GGUF_MAMBA_KEYS,
        "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
    }

    @staticmethod
    def gguf_members(get: Callable[..., Any], tensors: Collection[str]) -> dict[str, Any]:
        size = get("embedding_length")
        turned = get("rope.scaling.finetuned", True)
        between = get("feed_forward_length")
        return {
            **kinds_in_gguf(get, "linear_attention"),
            "mamba_expand": get("ssm.inner_size") // max(size, 1),
            "num_local_experts": get("expert_count", 0),
            "shared_intermediate_size": get("expert_shared_feed_forward_length", between),
            "attention_bias": any(name.endswith("attn_q.bias") for name in tensors),
            "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in tensors),
            "mamba_proj_bias": any(name.endswith("ssm_in.bias") for name in tensors),
            # Whether there are positions at all, as in llama.cpp.
            "position_embedding_type": "rope" if turned else None,
        }

    @staticmethod
    def gguf_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        return from_llama_cpp(tensors, "mamba")

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        # The names in older files.
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

    def make_rotaries(self) -> Sequence[nn.Module]:
        """Return no tables for a model without positions, because long tables are large."""
        has_positions = self.config.position_embedding_type == "rope"
        return super().make_rotaries() if has_positions else []

    def make_layer(self, layer: int) -> nn.Module:
        config, mlp = self.config, self.make_mlp(layer)
        if config.layer_types[layer] == "full_attention":
            return GraniteLayer(config, self.make_attention(layer), mlp)
        return GraniteLayer(config, mamba2_mixer(config, layer), mlp, "mamba")

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
        return SparseMoE(
            Router(size, routing),
            FusedMoE(
                size, config.intermediate_size, config.num_local_experts, activation=activation
            ),
            shared,
        )
