"""OLMoE (arXiv:2409.02060): Llama with a norm over all heads of queries and one of keys, and
mixtures of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ..config.model import ModelConfig
from ..config.model_registry import UnsupportedError
from ..layers.linear import StoredTensor
from ..layers.moe import FusedMoE, Router, Routing, SparseMoE
from ..layers.norm import AllHeadsRMSNorm
from ..layers.self_attention import SelfAttention
from .causal_lm import GGUF_BLOCK, CausalLM, gguf_names
from .experts import MERGED, take_apart
from .qwen3_moe import GGUF_EXPERTS

ARCHITECTURE = "OlmoeForCausalLM"
MODEL_TYPE = "olmoe"
GGUF_ARCHITECTURE = "olmoe"


@dataclass(frozen=True, slots=True, kw_only=True)
class OlmoeConfig(ModelConfig):
    attention_bias: bool = False
    clip_qkv: float | None = None
    num_experts: int = 64
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False


class OlmoeForCausalLM(CausalLM):
    config_class: ClassVar[type[ModelConfig]] = OlmoeConfig
    config_defaults: ClassVar = {
        **CausalLM.config_defaults,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    }
    gguf_names: ClassVar[dict[str, str]] = gguf_names({**GGUF_BLOCK, **GGUF_EXPERTS})
    gguf_keys: ClassVar[dict[str, str]] = {
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
    }

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        if config.clip_qkv is not None:
            raise UnsupportedError("clip_qkv is not supported; choose another model")
        return {}

    @staticmethod
    def gguf_members(get: Callable[..., Any], tensors: Collection[str]) -> dict[str, Any]:
        return {"attention_bias": "blk.0.attn_q.bias" in tensors}

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        return take_apart(tensors, MERGED)

    def make_attention(self, layer: int) -> nn.Module:
        config = self.config
        return SelfAttention(
            config,
            layer,
            qkv_bias=config.attention_bias,
            o_bias=config.attention_bias,
            q_norm=AllHeadsRMSNorm(config.num_heads * config.head_dim, config.norm_eps),
            k_norm=AllHeadsRMSNorm(config.num_kv_heads * config.head_dim, config.norm_eps),
        )

    def make_mlp(self, layer: int) -> nn.Module:
        config = self.config
        routing = Routing(
            config.num_experts, config.num_experts_per_tok, renormalized=config.norm_topk_prob
        )
        return SparseMoE(
            Router(config.hidden_size, routing),
            FusedMoE(
                config.hidden_size,
                config.intermediate_size,
                config.num_experts,
                activation=config.activation,
            ),
        )
