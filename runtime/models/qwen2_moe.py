"""Qwen2-MoE (arXiv:2407.10671): Qwen2 with mixtures of experts and a shared expert."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ...kernels.step_parts import MixtureParts, part_of
from ..config.model import ModelConfig, sliding_windows
from ..layers.linear import Linear, StoredTensor
from ..layers.mlp import GatedMLP
from ..layers.moe import FusedMoE, Router, Routing, SparseMoE
from ..layers.self_attention import SelfAttention
from .causal_lm import GGUF_BLOCK, gguf_names
from .experts import MERGED, one_row, take_apart
from .qwen2 import Qwen2ForCausalLM
from .qwen3_moe import GGUF_EXPERT_KEYS, GGUF_EXPERTS, has_experts

ARCHITECTURE = "Qwen2MoeForCausalLM"
MODEL_TYPE = "qwen2_moe"
GGUF_ARCHITECTURE = "qwen2moe"


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2MoeConfig(ModelConfig):
    num_experts: int = 60
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 1408
    shared_expert_intermediate_size: int = 5632
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None
    qkv_bias: bool = True


class Qwen2MoeBlock(SparseMoE):
    """The sigmoid of a further projection weighs the shared expert."""

    def __init__(self, config: Any) -> None:
        size, shared = config.hidden_size, config.shared_expert_intermediate_size
        if shared < 1:
            raise ValueError(
                f"shared_expert_intermediate_size must be at least 1, got {shared}; download the "
                "model again"
            )
        routing = Routing(
            config.num_experts, config.num_experts_per_tok, renormalized=config.norm_topk_prob
        )
        router = Router(size, routing)
        experts = FusedMoE(
            size,
            config.moe_intermediate_size,
            config.num_experts,
            activation=config.activation,
        )
        super().__init__(router, experts)
        self.shared_expert = GatedMLP(size, shared)
        self.shared_expert_gate = Linear(size, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.experts(x, *self.gate.choose(x))
        shared: torch.Tensor = self.shared_expert(x)
        return result + shared * torch.sigmoid(self.shared_expert_gate(x))

    def step_parts(self) -> MixtureParts:
        shared = part_of(self.shared_expert)
        return MixtureParts(self.gate, self.experts, shared, self.shared_expert_gate)


class Qwen2MoeForCausalLM(Qwen2ForCausalLM):
    """Some layers may have no experts."""

    config_class: ClassVar[type[ModelConfig]] = Qwen2MoeConfig
    config_defaults: ClassVar = {**Qwen2ForCausalLM.config_defaults, "num_key_value_heads": 16}
    gguf_names: ClassVar = gguf_names(
        {
            **GGUF_BLOCK,
            **GGUF_EXPERTS,
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
            "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
            "ffn_up_shexp": "mlp.shared_expert.up_proj",
            "ffn_down_shexp": "mlp.shared_expert.down_proj",
        }
    )
    gguf_keys: ClassVar = {
        **GGUF_EXPERT_KEYS,
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    }

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        window = config.sliding_window if config.use_sliding_window else None
        if getattr(config, "layer_types", None) is not None:
            return {"windows": sliding_windows(config, window, 0)}
        # The default of transformers' Qwen2MoeConfig.
        sliding = range(0, config.max_window_layers, 2)
        layers = range(config.num_hidden_layers)
        return {"windows": [window if layer in sliding else None for layer in layers]}

    @staticmethod
    def gguf_members(get: Callable[..., Any], tensors: Collection[str]) -> dict[str, Any]:
        return {"qkv_bias": "blk.0.attn_q.bias" in tensors}

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        return take_apart(tensors, MERGED)

    @staticmethod
    def gguf_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        # The file holds this matrix of one row as a vector.
        return [
            one_row(tensor) if tensor.name.endswith(".shared_expert_gate.weight") else tensor
            for tensor in tensors
        ]

    def make_attention(self, layer: int) -> nn.Module:
        return SelfAttention(self.config, layer, qkv_bias=self.config.qkv_bias)

    def make_mlp(self, layer: int) -> nn.Module:
        if not has_experts(self.config, layer):
            return super().make_mlp(layer)
        return Qwen2MoeBlock(self.config)
