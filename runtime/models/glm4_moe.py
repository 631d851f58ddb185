"""GLM 4.5 (arXiv:2508.06471): rotation of a part of each head, and after the first layers mixtures
of experts with a shared expert.
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
from ..layers.norm import RMSNorm
from ..layers.self_attention import SelfAttention
from .causal_lm import GGUF_BLOCK, CausalLM, gguf_names
from .checkpoint import renamed, within_layers
from .deepseek_v2 import CORRECTION, GGUF_ROUTING, GGUF_SHARED_EXPERTS
from .experts import MERGED, take_apart
from .qwen3_moe import GGUF_EXPERTS

ARCHITECTURE = "Glm4MoeForCausalLM"
MODEL_TYPE = "glm4_moe"
GGUF_ARCHITECTURE = "glm4moe"


@dataclass(frozen=True, slots=True, kw_only=True)
class Glm4MoeConfig(ModelConfig):
    attention_bias: bool = False
    use_qk_norm: bool = False
    moe_intermediate_size: int = 1408
    num_experts_per_tok: int = 8
    n_shared_experts: int = 1
    n_routed_experts: int = 128
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    first_k_dense_replace: int = 1
    norm_topk_prob: bool = True


class Glm4MoeForCausalLM(CausalLM):
    """Layers after the last one, which predict further tokens, are no part of the model. See
    `NextLayer`.
    """

    config_class: ClassVar[type[ModelConfig]] = Glm4MoeConfig
    has_next_layer = True
    config_defaults: ClassVar = {
        **CausalLM.config_defaults,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
    }
    takes_partial_rotary = True
    gguf_names: ClassVar[dict[str, str]] = gguf_names(
        {
            **GGUF_BLOCK,
            **GGUF_EXPERTS,
            **GGUF_SHARED_EXPERTS,
            "post_attention_norm": "post_attention_layernorm",
        }
    )
    gguf_keys: ClassVar[dict[str, str]] = GGUF_ROUTING

    @staticmethod
    def gguf_members(get: Callable[..., Any], tensors: Collection[str]) -> dict[str, Any]:
        return {
            "num_hidden_layers": get("block_count") - get("nextn_predict_layers", 0),
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "use_qk_norm": "blk.0.attn_q_norm.weight" in tensors,
            "norm_topk_prob": bool(get("expert_weights_norm", False)),
        }

    @staticmethod
    def gguf_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        return renamed(within_layers(tensors, config.num_layers), CORRECTION)

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        return take_apart(within_layers(tensors, config.num_layers), MERGED)

    def make_attention(self, layer: int) -> nn.Module:
        config = self.config
        norms = [
            RMSNorm(config.head_dim, config.norm_eps) if config.use_qk_norm else None
            for _ in range(2)
        ]
        return SelfAttention(
            config, layer, qkv_bias=config.attention_bias, q_norm=norms[0], k_norm=norms[1]
        )

    def make_mlp(self, layer: int) -> nn.Module:
        config = self.config
        if layer < config.first_k_dense_replace:
            return super().make_mlp(layer)
        size, width = config.hidden_size, config.moe_intermediate_size
        routing = Routing(
            config.n_routed_experts,
            config.num_experts_per_tok,
            "sigmoid",
            config.norm_topk_prob,
            config.n_group,
            config.topk_group,
            config.routed_scaling_factor,
        )
        return SparseMoE(
            Router(size, routing, correction=True),
            FusedMoE(size, width, config.n_routed_experts, activation=config.activation),
            GatedMLP(size, width * config.n_shared_experts),
        )
