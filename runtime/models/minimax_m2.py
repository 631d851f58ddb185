"""MiniMax-M2: a norm over all heads of queries and one of keys, rotation of a part of each head,
and mixtures of experts that are scored by sigmoids and chosen by corrected scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ..config.model import ModelConfig
from ..layers.linear import StoredTensor
from ..layers.moe import FusedMoE, Router, Routing, SparseMoE
from ..layers.norm import AllHeadsRMSNorm
from ..layers.self_attention import SelfAttention
from .causal_lm import CausalLM, gguf_names
from .checkpoint import renamed
from .deepseek_v2 import CORRECTION
from .mixtral import MixtralForCausalLM

ARCHITECTURE = "MiniMaxM2ForCausalLM"
MODEL_TYPE = "minimax_m2"
GGUF_ARCHITECTURE = "minimax-m2"


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniMaxM2Config(ModelConfig):
    num_local_experts: int = 256
    num_experts_per_tok: int = 8


def turned_part(config: Any) -> dict[str, Any]:
    """Return `rotary_dim` of a config.json, the rotated numbers of a head, if it is given.

    Published files have it in place of partial_rotary_factor. Raises `ValueError`.
    """
    if (turned := config.rotary_dim) is None:
        return {}
    if type(turned) is not int:
        raise ValueError(
            f"rotary_dim must be a whole number, got {turned!r:.60}; download the model again"
        )
    return {"rotary_dim": turned}


class MiniMaxM2ForCausalLM(CausalLM):
    """Checkpoints name the gate, down and up projections w1, w2 and w3."""

    config_class: ClassVar[type[ModelConfig]] = MiniMaxM2Config
    config_defaults: ClassVar = {
        **CausalLM.config_defaults,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 196608,
        "rope_theta": 5000000.0,
        "rotary_dim": None,
    }
    takes_partial_rotary = True
    gguf_names: ClassVar[dict[str, str]] = {
        **MixtralForCausalLM.gguf_names,
        **gguf_names({"exp_probs_b": "mlp.gate.e_score_correction"}),
    }
    gguf_keys: ClassVar[dict[str, str]] = {
        **MixtralForCausalLM.gguf_keys,
        "expert_feed_forward_length": "intermediate_size",
    }

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        return turned_part(config)

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        return renamed(
            tensors,
            {
                r"\.(?:block_sparse_moe|mlp)\.e_score": ".mlp.gate.e_score",
                r"\.block_sparse_moe\.": ".mlp.",
            },
        )

    @staticmethod
    def gguf_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        return renamed(tensors, CORRECTION)

    def make_attention(self, layer: int) -> nn.Module:
        config = self.config
        return SelfAttention(
            config,
            layer,
            q_norm=AllHeadsRMSNorm(config.num_heads * config.head_dim, config.norm_eps),
            k_norm=AllHeadsRMSNorm(config.num_kv_heads * config.head_dim, config.norm_eps),
        )

    def make_mlp(self, layer: int) -> nn.Module:
        config = self.config
        routing = Routing(config.num_local_experts, config.num_experts_per_tok, "sigmoid")
        sizes = config.hidden_size, config.intermediate_size, config.num_local_experts
        return SparseMoE(
            Router(config.hidden_size, routing, correction=True),
            FusedMoE(*sizes, activation=config.activation, names=("w1", "w3", "w2")),
        )
