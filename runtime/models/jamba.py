"""Jamba (arXiv:2403.19887): Mamba with norms as in FalconMamba in most layers, attention without
positions in a few, and mixtures of experts in some feed-forward layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ..config.model import ModelConfig
from ..layers.decoder import DecoderLayer
from ..layers.linear import StoredTensor
from ..layers.moe import FusedMoE, Router, Routing, SparseMoE
from ..layers.norm import RMSNorm
from ..layers.self_attention import SelfAttention
from .causal_lm import GGUF_BLOCK, CausalLM, gguf_names
from .checkpoint import from_llama_cpp, renamed
from .experts import MERGED, take_apart
from .hybrid import (
    GGUF_FIRST_MAMBA,
    GGUF_FIRST_MAMBA_KEYS,
    MambaConfig,
    first_mamba_fields,
    first_mamba_in_gguf,
    first_mamba_tensors,
    kinds_in_gguf,
    kinds_of_layers,
    mamba_mixer,
)
from .qwen3_moe import GGUF_EXPERTS

ARCHITECTURE = "JambaForCausalLM"
MODEL_TYPE = "jamba"
GGUF_ARCHITECTURE = "jamba"


@dataclass(frozen=True, slots=True, kw_only=True)
class JambaConfig(MambaConfig):
    """`sparse_layers` are the layers with mixtures of experts."""

    layer_types: list[str] | None = None
    sparse_layers: list[int] | None = None
    num_experts: int = 16
    num_experts_per_tok: int = 2


class JambaForCausalLM(CausalLM):
    config_class: ClassVar[type[ModelConfig]] = JambaConfig
    config_defaults: ClassVar = {
        **CausalLM.config_defaults,
        "vocab_size": 65536,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 262144,
    }
    gguf_names: ClassVar[dict[str, str]] = gguf_names(
        {**GGUF_BLOCK, **GGUF_FIRST_MAMBA, **GGUF_EXPERTS}
    )
    gguf_keys: ClassVar[dict[str, str]] = {
        **GGUF_FIRST_MAMBA_KEYS,
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
    }

    @staticmethod
    def gguf_members(get: Callable[..., Any], tensors: Collection[str]) -> dict[str, Any]:
        return {
            **first_mamba_in_gguf(get, tensors),
            **kinds_in_gguf(get, "linear_attention"),
            "sparse_layers": [
                layer
                for layer in range(get("block_count"))
                if f"blk.{layer}.ffn_gate_inp.weight" in tensors
            ],
        }

    @staticmethod
    def gguf_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        return from_llama_cpp(tensors, "mamba", decays="A")

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        attending = _every(config, "attn", 8, 4)
        kinds = [
            "full_attention" if layer in attending else "linear_attention"
            for layer in range(config.num_hidden_layers)
        ]
        sparse = config.sparse_layers
        if sparse is None:
            sparse = _every(config, "expert", 2, 1) if config.num_experts > 1 else []
        return {
            **kinds_of_layers(config, ("linear_attention", "full_attention"), kinds),
            **first_mamba_fields(config),
            "sparse_layers": sparse,
        }

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        names = {
            r"\.feed_forward\.router\.": ".mlp.gate.",
            r"\.feed_forward\.": ".mlp.",
            r"\.pre_ff_layernorm\.": ".post_attention_layernorm.",
            r"^model\.final_layernorm\.": "model.norm.",
        }
        return take_apart(first_mamba_tensors(renamed(tensors, names)), MERGED)

    def make_rotaries(self) -> Sequence[nn.Module]:
        return []

    def make_layer(self, layer: int) -> nn.Module:
        config, mlp = self.config, self.make_mlp(layer)
        if config.layer_types[layer] == "full_attention":
            return DecoderLayer(config, SelfAttention(config, layer, rotary=None), mlp)

        def norm(size: int) -> nn.Module:
            return RMSNorm(size, config.norm_eps)

        inner = config.mamba_expand * config.hidden_size
        return DecoderLayer(config, mamba_mixer(config, layer, inner, norm), mlp, "mamba")

    def make_mlp(self, layer: int) -> nn.Module:
        config = self.config
        if layer not in config.sparse_layers:
            return super().make_mlp(layer)
        size, experts = config.hidden_size, config.num_experts
        routing = Routing(experts, config.num_experts_per_tok, renormalized=False)
        return SparseMoE(
            Router(size, routing),
            FusedMoE(size, config.intermediate_size, experts, activation=config.activation),
        )


def _every(config: Any, kind: str, period: int, offset: int) -> list[int]:
    """Return the layers that `{kind}_layer_period` and `{kind}_layer_offset` select.

    `period` and `offset` are the defaults. Raises `ValueError`.
    """
    names = f"{kind}_layer_period", f"{kind}_layer_offset"
    found = getattr(config, names[0], period), getattr(config, names[1], offset)
    if any(type(each) is not int for each in found) or not 0 <= found[1] < found[0]:
        raise ValueError(
            f"{names[1]} must be a whole number from 0 to below {names[0]}, got {found[1]!r:.60} "
            f"and {found[0]!r:.60}; download the model again"
        )
    return list(range(found[1], config.num_hidden_layers, found[0]))
