"""DeepSeek V2 (arXiv:2405.04434): latent attention, and behind the first layers experts beside
those that all tokens go through.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ..layers.latent_attention import LatentAttention, LatentSizes
from ..layers.linear import StoredTensor
from ..layers.mlp import GatedMLP
from ..layers.moe import FusedMoE, Router, Routing, SparseMoE
from ..layers.rope_scaling import yarn_mscale
from ..loader.experts import MERGED, take_apart
from ..model_config import ModelConfig
from .causal_lm import CausalLM

ARCHITECTURE = "DeepseekV2ForCausalLM"
MODEL_TYPE = "deepseek_v2"
_METHODS = ("greedy", "group_limited_greedy")
"""How experts are chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig(ModelConfig):
    """What models with latent attention say of it and of their experts."""

    attention_bias: bool = False
    kv_lora_rank: int = 512
    q_lora_rank: int | None = 1536
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    n_shared_experts: int = 1
    n_routed_experts: int = 256
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 2048
    first_k_dense_replace: int = 0
    routed_scaling_factor: float = 1.0

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        self.check_positive(
            *("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
            *("n_shared_experts", "n_routed_experts", "moe_intermediate_size"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV2Config(LatentConfig):
    n_shared_experts: int = 2
    n_routed_experts: int = 64
    moe_intermediate_size: int = 1407
    topk_method: str = "greedy"
    n_group: int | None = None
    topk_group: int | None = None

    def __post_init__(self) -> None:
        LatentConfig.__post_init__(self)
        if self.topk_method not in _METHODS:
            raise ValueError(
                f"topk_method must be {' or '.join(_METHODS)}, got {self.topk_method!r:.60}; fetch "
                "the model again"
            )


class DeepseekV2ForCausalLM(CausalLM):
    """Layers that predict more than the next token, behind the last one, are left out."""

    config_class: ClassVar[type[ModelConfig]] = DeepseekV2Config
    config_defaults: ClassVar = {**CausalLM.config_defaults, "head_dim": 64}
    takes_partial_rotary = True

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        turned = config.qk_rope_head_dim
        return {
            "head_dim": config.qk_nope_head_dim + turned,
            "rotary_dim": turned,
            "num_kv_heads": 1,
        }

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        kept = [
            tensor
            for tensor in tensors
            if not (found := re.match(r"model\.layers\.(\d+)\.", tensor.name))
            or int(found[1]) < config.num_layers
        ]
        return take_apart(kept, MERGED)

    def make_attention(self, layer: int) -> nn.Module:
        config = self.config
        sizes = LatentSizes(
            config.kv_lora_rank,
            config.qk_rope_head_dim,
            config.qk_nope_head_dim,
            config.v_head_dim,
            config.q_lora_rank,
        )
        sharper = 1.0
        if config.rope_type != "default" and config.rope_scaling.get("mscale_all_dim"):
            sharper = yarn_mscale(
                config.rope_scaling["factor"], config.rope_scaling["mscale_all_dim"]
            )
        return LatentAttention(
            config,
            layer,
            sizes,
            scale=config.head_dim**-0.5 * sharper**2,
            interleaved=getattr(config, "rope_interleave", True),
            bias=config.attention_bias,
        )

    def routing(self) -> Routing:
        """How experts are chosen: groups of them are as good as their best one."""
        config = self.config
        has_groups = config.topk_method == "group_limited_greedy"
        return Routing(
            config.n_routed_experts,
            config.num_experts_per_tok,
            renormalized=False,
            num_groups=(config.n_group or 1) if has_groups else 1,
            top_groups=(config.topk_group or 1) if has_groups else 1,
            scale=config.routed_scaling_factor,
            group_best=1,
        )

    def has_experts(self, layer: int) -> bool:
        return bool(layer >= self.config.first_k_dense_replace)

    def make_mlp(self, layer: int) -> nn.Module:
        config = self.config
        if not self.has_experts(layer):
            return super().make_mlp(layer)
        size, width, routing = config.hidden_size, config.moe_intermediate_size, self.routing()
        return SparseMoE(
            Router(size, routing, correction=routing.scoring == "sigmoid"),
            FusedMoE(size, width, config.n_routed_experts),
            GatedMLP(size, width * config.n_shared_experts),
        )
