"""Mixtral (arXiv:2401.04088): Mistral with mixtures of experts as feed-forward layers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ..config.model import ModelConfig
from ..layers.linear import StoredTensor
from ..layers.moe import FusedMoE, Router, Routing, SparseMoE
from .causal_lm import GGUF_BLOCK, gguf_names
from .checkpoint import renamed
from .mistral import MistralForCausalLM

ARCHITECTURE = "MixtralForCausalLM"
MODEL_TYPE = "mixtral"
GGUF_ARCHITECTURE = "llama"


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtralConfig(ModelConfig):
    num_local_experts: int = 8
    num_experts_per_tok: int = 2


class MixtralForCausalLM(MistralForCausalLM):
    """Checkpoints name the gate, down and up projections w1, w2 and w3."""

    config_class: ClassVar[type[ModelConfig]] = MixtralConfig
    config_defaults: ClassVar = {
        **MistralForCausalLM.config_defaults,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "rope_theta": 1000000.0,
    }

    gguf_names: ClassVar = gguf_names(
        {
            **GGUF_BLOCK,
            "ffn_gate_inp": "mlp.gate",
            "ffn_gate_exps": "mlp.experts.*.w1",
            "ffn_down_exps": "mlp.experts.*.w2",
            "ffn_up_exps": "mlp.experts.*.w3",
        }
    )
    gguf_keys: ClassVar = {
        "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
    }

    @staticmethod
    def fits_gguf(get: Callable[..., Any]) -> bool:
        return bool(get("expert_count", 0))

    @staticmethod
    def gguf_members(get: Callable[..., Any], tensors: Collection[str]) -> dict[str, Any]:
        return {}

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        return renamed(tensors, {r"\.block_sparse_moe\.": ".mlp."})

    def make_mlp(self, layer: int) -> nn.Module:
        return mixtral_experts(self.config)


def mixtral_experts(config: Any) -> SparseMoE:
    """Return the mixture of experts of a layer."""
    routing = Routing(config.num_local_experts, config.num_experts_per_tok)
    sizes = config.hidden_size, config.intermediate_size, config.num_local_experts
    return SparseMoE(
        Router(config.hidden_size, routing),
        FusedMoE(*sizes, activation=config.activation, names=("w1", "w3", "w2")),
    )
