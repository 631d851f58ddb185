"""Qwen3-MoE (arXiv:2505.09388): Qwen3 with mixtures of experts as feed-forward layers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ..config.model import ModelConfig
from ..layers.linear import StoredTensor
from ..layers.moe import FusedMoE, Router, Routing, SparseMoE
from .causal_lm import GGUF_BLOCK, gguf_names
from .experts import MERGED, take_apart
from .qwen3 import Qwen3Config, Qwen3ForCausalLM

ARCHITECTURE = "Qwen3MoeForCausalLM"
MODEL_TYPE = "qwen3_moe"
GGUF_ARCHITECTURE = "qwen3moe"

# Names in GGUF files of the modules of a layer with experts, for most models.
GGUF_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
}
GGUF_EXPERT_KEYS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3MoeConfig(Qwen3Config):
    num_experts: int = 128
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 768
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """Some layers may have no experts."""

    config_class: ClassVar[type[ModelConfig]] = Qwen3MoeConfig
    config_defaults: ClassVar = {
        **Qwen3ForCausalLM.config_defaults,
        "num_key_value_heads": 4,
        "head_dim": None,
    }
    gguf_names: ClassVar = gguf_names({**GGUF_BLOCK, **GGUF_EXPERTS})
    gguf_keys: ClassVar = GGUF_EXPERT_KEYS

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        fields = Qwen3ForCausalLM.config_fields(config)
        # The name in transformers 5.
        count = getattr(config, "num_local_experts", config.num_experts)
        if type(count) is not int:
            raise ValueError(
                f"num_local_experts must be a whole number, got {count!r:.60}; download the model "
                "again"
            )
        window = config.sliding_window if config.use_sliding_window else None
        windows = [window] * config.num_hidden_layers
        return {**fields, "windows": windows, "num_experts": count}

    @staticmethod
    def gguf_members(get: Callable[..., Any], tensors: Collection[str]) -> dict[str, Any]:
        members = Qwen3ForCausalLM.gguf_members(get, tensors)
        return {**members, "norm_topk_prob": True}

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        return take_apart(tensors, MERGED)

    def make_mlp(self, layer: int) -> nn.Module:
        config = self.config
        if not has_experts(config, layer):
            return super().make_mlp(layer)
        routing = Routing(
            config.num_experts, config.num_experts_per_tok, renormalized=config.norm_topk_prob
        )
        return SparseMoE(
            Router(config.hidden_size, routing),
            FusedMoE(
                config.hidden_size,
                config.moe_intermediate_size,
                config.num_experts,
                activation=config.activation,
            ),
        )


def has_experts(config: Any, layer: int) -> bool:
    """Whether a layer of a model of Qwen has experts."""
    return (
        layer not in (config.mlp_only_layers or ())
        and config.num_experts > 0
        and (layer + 1) % max(config.decoder_sparse_step, 1) == 0
    )
