"""LongCat-Flash (arXiv:2509.01322): each layer has latent attention and a feed-forward twice, and a
mixture of experts that reads the first half and is added after the second. Some experts return
their input.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ..config.model import ModelConfig
from ..config.model_registry import UnsupportedError
from ..layers.latent_attention import LatentAttention
from ..layers.linear import StoredTensor
from ..layers.mlp import GatedMLP
from ..layers.moe import FusedMoE, Router, Routing
from ..layers.norm import RMSNorm
from ..layers.rotary import Rotations
from .checkpoint import renamed
from .deepseek_v2 import DeepseekV2ForCausalLM, LatentConfig
from .experts import MERGED, take_apart

ARCHITECTURE = "LongcatFlashForCausalLM"
MODEL_TYPE = "longcat_flash"

_NAMES = {
    # Layers that predict tokens after the next one are left out.
    r"^model\.mtp\..*": "",
    r"\.mlp\.router\.classifier\.": ".mlp.gate.",
    r"\.mlp\.router\.": ".mlp.gate.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LongcatFlashConfig(LatentConfig):
    """`zero_expert_num` experts return their input. Their numbers follow those of experts with
    weights.
    """

    n_routed_experts: int = 512
    num_experts_per_tok: int = 12
    routed_scaling_factor: float = 6.0
    zero_expert_num: int | None = 256
    zero_expert_type: str = "identity"
    router_bias: bool = False

    def __post_init__(self) -> None:
        LatentConfig.__post_init__(self)
        if self.q_lora_rank is None:
            raise ValueError("it has no q_lora_rank; download the model again")
        if self.zero_expert_type != "identity":
            raise UnsupportedError(
                f"zero_expert_type {self.zero_expert_type!r:.60} is not supported, identity is; "
                "choose another model"
            )

    @property
    def all_experts(self) -> int:
        return self.n_routed_experts + (self.zero_expert_num or 0)


class ZeroExpertMoE(nn.Module):
    """A mixture of experts with weights and of experts that return their input.

    If ranks share the experts with weights, the ranks' results are summed first. Each rank then
    adds the returned inputs itself.
    """

    def __init__(self, config: LongcatFlashConfig) -> None:
        super().__init__()
        size, experts = config.hidden_size, config.n_routed_experts
        routing = Routing(
            config.all_experts,
            config.num_experts_per_tok,
            renormalized=False,
            scale=config.routed_scaling_factor,
        )
        self.with_weights = experts
        self.gate = Router(size, routing, bias=config.router_bias, correction=True)
        self.experts = FusedMoE(size, config.moe_intermediate_size, experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids, weights = self.gate.choose(x)
        made: torch.Tensor = self.experts(x, ids, weights)
        returned = weights.masked_fill(ids < self.with_weights, 0.0).sum(-1, keepdim=True)
        return made + x * returned.to(x.dtype)


class LongcatFlashLayer(nn.Module):
    def __init__(
        self, config: LongcatFlashConfig, attentions: Sequence[nn.Module], mlps: Sequence[nn.Module]
    ) -> None:
        super().__init__()
        self.self_attn, self.mlps = nn.ModuleList(attentions), nn.ModuleList(mlps)
        self.input_layernorm, self.post_attention_layernorm = (
            nn.ModuleList(RMSNorm(config.hidden_size, config.norm_eps) for _ in attentions)
            for _ in range(2)
        )
        self.mlp = ZeroExpertMoE(config)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rotations: Rotations
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DecoderLayer.forward`."""
        shortcut: Any = None
        norms = self.input_layernorm, self.post_attention_layernorm
        halves: Any = zip(*norms, self.self_attn, self.mlps, strict=True)
        for before, between, attention, mlp in halves:
            x, residual = (before(x), x) if residual is None else before.add(x, residual)
            x, residual = between.add(attention(x, rotations), residual)
            if shortcut is None:
                shortcut = self.mlp(x)
            x = mlp(x)
        assert residual is not None
        return x + shortcut, residual


class LongcatFlashForCausalLM(DeepseekV2ForCausalLM):
    config_class: ClassVar[type[ModelConfig]] = LongcatFlashConfig
    config_defaults: ClassVar = {
        **DeepseekV2ForCausalLM.config_defaults,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e7,
    }
    config_names: ClassVar[dict[str, str]] = {
        "num_layers": "num_hidden_layers",
        "ffn_hidden_size": "intermediate_size",
        "moe_topk": "num_experts_per_tok",
        "expert_ffn_hidden_size": "moe_intermediate_size",
    }

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        """Leave out weights of experts that return their input, which transformers writes."""

        def has_weights(name: str) -> bool:
            found = re.search(r"\.experts\.(\d+)\.", name)
            return found is None or int(found[1]) < config.n_routed_experts

        apart = take_apart(renamed(tensors, _NAMES), MERGED)
        return [tensor for tensor in apart if has_weights(tensor.name)]

    def make_attention(self, layer: int) -> nn.Module:
        config, attention = self.config, super().make_attention(layer)
        assert isinstance(attention, LatentAttention)
        attention.scale *= (config.hidden_size / config.q_lora_rank) ** 0.5
        attention.latent_scale = (config.hidden_size / config.kv_lora_rank) ** 0.5
        return attention

    def make_layer(self, layer: int) -> nn.Module:
        config = self.config
        attentions = [self.make_attention(layer) for _ in range(2)]
        mlps = [
            GatedMLP(config.hidden_size, config.intermediate_size, activation=config.activation)
            for _ in range(2)
        ]
        return LongcatFlashLayer(config, attentions, mlps)
