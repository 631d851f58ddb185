"""LFM2-MoE (Liquid AI): LFM2 with mixtures of experts after the first layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ..config.model import ModelConfig
from ..layers.linear import StoredTensor
from ..layers.mlp import GatedMLP
from ..layers.moe import FusedMoE, Router, Routing, SparseMoE
from .causal_lm import gguf_names
from .checkpoint import renamed
from .experts import MERGED, take_apart
from .lfm2 import GGUF, NAMES, Lfm2Config, Lfm2ForCausalLM
from .qwen3_moe import GGUF_EXPERT_KEYS, GGUF_EXPERTS

ARCHITECTURE = "Lfm2MoeForCausalLM"
MODEL_TYPE = "lfm2_moe"
GGUF_ARCHITECTURE = "lfm2moe"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lfm2MoeConfig(Lfm2Config):
    block_auto_adjust_ff_dim: bool = False
    moe_intermediate_size: int = 1792
    num_dense_layers: int = 2
    num_experts: int = 32
    num_experts_per_tok: int = 4
    use_expert_bias: bool = True
    routed_scaling_factor: float = 1.0
    norm_topk_prob: bool = True


class Lfm2MoeForCausalLM(Lfm2ForCausalLM):
    config_class: ClassVar[type[ModelConfig]] = Lfm2MoeConfig
    config_defaults: ClassVar = {
        **Lfm2ForCausalLM.config_defaults,
        "hidden_size": 2048,
        "intermediate_size": 7168,
    }

    gguf_names: ClassVar[dict[str, str]] = {
        **gguf_names({**GGUF, **GGUF_EXPERTS, "exp_probs_b": "mlp.gate.correction"}),
        "token_embd_norm": "model.norm",
    }
    gguf_keys: ClassVar[dict[str, str]] = {
        **Lfm2ForCausalLM.gguf_keys,
        **GGUF_EXPERT_KEYS,
        "leading_dense_block_count": "num_dense_layers",
    }

    @staticmethod
    def gguf_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        names = {r"\.gate\.correction\.bias$": ".gate.e_score_correction_bias"}
        return renamed(Lfm2ForCausalLM.gguf_tensors(config, tensors), names)

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        return take_apart(renamed(tensors, NAMES), MERGED)

    def make_mlp(self, layer: int) -> nn.Module:
        config = self.config
        if layer < config.num_dense_layers:
            return GatedMLP(config.hidden_size, config.intermediate_size)
        routing = Routing(
            config.num_experts,
            config.num_experts_per_tok,
            "sigmoid",
            config.norm_topk_prob,
            scale=config.routed_scaling_factor,
            least_sum=1e-6,
        )
        size, width = config.hidden_size, config.moe_intermediate_size
        return SparseMoE(
            Router(size, routing, correction=config.use_expert_bias),
            FusedMoE(size, width, config.num_experts),
        )
