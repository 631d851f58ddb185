"""Granite MoE (IBM): Granite with mixtures of experts as feed-forward layers."""

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
from .experts import MERGED, take_apart
from .granite import GraniteConfig, GraniteForCausalLM
from .qwen3_moe import GGUF_EXPERTS

ARCHITECTURE = "GraniteMoeForCausalLM"
MODEL_TYPE = "granitemoe"
GGUF_ARCHITECTURE = "granitemoe"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteMoeConfig(GraniteConfig):
    num_local_experts: int = 8
    num_experts_per_tok: int = 2


class GraniteMoeForCausalLM(GraniteForCausalLM):
    """Checkpoints hold the experts of a layer as input_linear and output_linear."""

    config_class: ClassVar[type[ModelConfig]] = GraniteMoeConfig
    gguf_names: ClassVar[dict[str, str]] = gguf_names({**GGUF_BLOCK, **GGUF_EXPERTS})
    gguf_keys: ClassVar[dict[str, str]] = {
        **GraniteForCausalLM.gguf_keys,
        "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
    }

    @staticmethod
    def gguf_members(get: Callable[..., Any], tensors: Collection[str]) -> dict[str, Any]:
        return {"attention_bias": "blk.0.attn_q.bias" in tensors}

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        names = {
            r"\.block_sparse_moe\.input_linear\.weight$": ".mlp.experts.gate_up_proj",
            r"\.block_sparse_moe\.output_linear\.weight$": ".mlp.experts.down_proj",
            r"\.block_sparse_moe\.router\.(layer\.)?": ".mlp.gate.",
            r"\.block_sparse_moe\.": ".mlp.",
        }
        return take_apart(renamed(tensors, names), MERGED)

    def make_mlp(self, layer: int) -> nn.Module:
        config = self.config
        sizes = config.hidden_size, config.intermediate_size, config.num_local_experts
        routing = Routing(config.num_local_experts, config.num_experts_per_tok)
        return SparseMoE(
            Router(config.hidden_size, routing), FusedMoE(*sizes, activation=config.activation)
        )
