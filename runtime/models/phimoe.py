"""Phi-3.5-MoE (Microsoft): Mixtral with LayerNorms, biases and LongRoPE. SparseMixer
(arXiv:2409.12136) weighs each expert by a softmax of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ..config.model import ModelConfig, sliding_windows
from ..config.model_registry import UnsupportedError
from ..layers.linear import Linear
from ..layers.moe import FusedMoE, Router, Routing, SparseMoE
from ..layers.norm import LayerNorm
from ..layers.self_attention import SelfAttention
from .mixtral import MixtralConfig, MixtralForCausalLM

ARCHITECTURE = "PhimoeForCausalLM"
MODEL_TYPE = "phimoe"
ALSO_ARCHITECTURE = "PhiMoEForCausalLM"
GGUF_ARCHITECTURE = "phimoe"


@dataclass(frozen=True, slots=True, kw_only=True)
class PhimoeConfig(MixtralConfig):
    num_local_experts: int = 16
    attention_bias: bool = False
    lm_head_bias: bool = False
    router_jitter_noise: float = 0.01


class SparseMixer(Router):
    """Chooses the two experts with the largest logits.

    The weight of an expert is its softmax among the experts whose logits lie at most `reach` below
    its own, relative to the larger of the two magnitudes. Experts that were chosen before are left
    out.
    """

    def __init__(self, hidden_size: int, routing: Routing, reach: float) -> None:
        super().__init__(hidden_size, routing)
        self.reach = reach

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self(x).float()
        left = logits
        ids: list[torch.Tensor] = []
        weights: list[torch.Tensor] = []
        for _ in range(self.routing.top_k):
            best, chosen = left.max(-1, keepdim=True)
            far = (best - logits) / logits.abs().maximum(best) > self.reach
            weights.append(left.masked_fill(far, float("-inf")).softmax(-1).gather(-1, chosen))
            ids.append(chosen)
            left = left.scatter(-1, chosen, float("-inf"))
        return torch.cat(ids, -1), torch.cat(weights, -1)


class PhimoeForCausalLM(MixtralForCausalLM):
    config_class: ClassVar[type[ModelConfig]] = PhimoeConfig
    config_defaults: ClassVar = {
        **MixtralForCausalLM.config_defaults,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    }
    gguf_keys: ClassVar = {
        **MixtralForCausalLM.gguf_keys,
        "attention.sliding_window": "sliding_window",
    }
    gguf_interleaves_heads = False

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        if self.config.lm_head_bias:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=True)

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        if config.num_experts_per_tok != 2:
            raise UnsupportedError(
                f"num_experts_per_tok is {config.num_experts_per_tok}, and SparseMixer takes 2; "
                "choose another model"
            )
        # 0 means none.
        return {"windows": sliding_windows(config, config.sliding_window or None, 0)}

    @staticmethod
    def gguf_members(get: Callable[..., Any], tensors: Collection[str]) -> dict[str, Any]:
        return {
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "lm_head_bias": "output.bias" in tensors,
        }

    def make_norm(self) -> nn.Module:
        return LayerNorm(self.config.hidden_size, eps=self.config.norm_eps, bias=True)

    def make_attention(self, layer: int) -> nn.Module:
        biased = self.config.attention_bias
        return SelfAttention(self.config, layer, qkv_bias=biased, o_bias=biased)

    def make_mlp(self, layer: int) -> nn.Module:
        config = self.config
        routing = Routing(config.num_local_experts, config.num_experts_per_tok)
        sizes = config.hidden_size, config.intermediate_size, config.num_local_experts
        return SparseMoE(
            SparseMixer(config.hidden_size, routing, 2 * config.router_jitter_noise),
            FusedMoE(*sizes, activation=config.activation, names=("w1", "w3", "w2")),
        )
