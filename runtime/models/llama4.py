"""Llama 4 Scout and Maverick (Meta): three of four layers attend in chunks, with positions and
norms without weights. The others have full attention without positions, and scale the queries of
long texts. All layers, or every other one, are mixtures of experts that weigh the input of an
expert.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ..config.model import ModelConfig, check_size
from ..layers.linear import StoredTensor
from ..layers.mlp import GatedMLP
from ..layers.moe import FusedMoE, Router, Routing, SparseMoE
from ..layers.norm import UnweightedRMSNorm
from ..layers.rotary import Rotations
from ..layers.self_attention import SelfAttention
from .causal_lm import GGUF_BLOCK, CausalLM, gguf_names
from .checkpoint import renamed
from .deepseek_v2 import GGUF_SHARED_EXPERTS
from .experts import Merged, take_apart
from .qwen3_moe import GGUF_EXPERTS

ARCHITECTURE = "Llama4ForCausalLM"
MODEL_TYPE = "llama4_text"
GGUF_ARCHITECTURE = "llama4"

_MERGED = {
    "gate_up_proj": Merged(("gate_proj", "up_proj"), transposed=True),
    "down_proj": Merged(("down_proj",), transposed=True),
}
_NAMES = {
    r"\.feed_forward\.router\.": ".mlp.gate.",
    r"\.feed_forward\.shared_expert\.": ".mlp.shared_experts.",
    r"\.feed_forward\.": ".mlp.",
}
_MAVERICKS_EXPERTS = 128  # Experts of Maverick, the only model without norms of queries and keys.
_CHUNKED, _WHOLE = "chunked_attention", "full_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama4Config(ModelConfig):
    """The members of config.json.

    `intermediate_size` belongs to experts, `intermediate_size_mlp` to layers without experts.
    `moe_layers` are the layers with experts. `no_rope_layers` has a number for each layer, 0 if it
    uses no positions.
    """

    intermediate_size_mlp: int = 16384
    num_experts_per_tok: int = 1
    num_local_experts: int = 16
    moe_layers: list[int] | None = None
    interleave_moe_layer_step: int = 1
    use_qk_norm: bool = True
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: int = 4
    attention_chunk_size: int | None = 8192
    attn_temperature_tuning: bool | int = True
    floor_scale: int = 8192
    attn_scale: float = 0.1
    attention_bias: bool = False

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        self.check_positive("intermediate_size_mlp", "floor_scale")


class QuerySharpening(nn.Module):
    """Maps positions [T] int64 to factors of queries [T, 1, 1] float32 (arXiv:2501.19399)."""

    def __init__(self, scale: float, floor: int) -> None:
        super().__init__()
        self.scale, self.floor = scale, floor

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        times = torch.floor((positions.float() + 1.0) / self.floor)
        return (torch.log1p(times) * self.scale + 1.0)[:, None, None]


class UnturnedAttention(SelfAttention):
    """Attention without positions. Its table is a `QuerySharpening`."""

    def turn(self, heads: torch.Tensor, rotations: Rotations) -> torch.Tensor:
        q, k = heads.tensor_split([self.num_heads], dim=1)
        assert self.rotary is not None
        scale: Any = rotations[self.rotary]
        return torch.cat(((q * scale).to(q.dtype), k), dim=1)


class Llama4ForCausalLM(CausalLM):
    config_class: ClassVar[type[ModelConfig]] = Llama4Config
    config_defaults: ClassVar = {
        **CausalLM.config_defaults,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
    }

    gguf_names: ClassVar[dict[str, str]] = gguf_names(
        {**GGUF_BLOCK, **GGUF_EXPERTS, **GGUF_SHARED_EXPERTS}
    )
    gguf_keys: ClassVar[dict[str, str]] = {
        "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "intermediate_size",
        "feed_forward_length": "intermediate_size_mlp",
        "interleave_moe_layer_step": "interleave_moe_layer_step",
    }

    @staticmethod
    def gguf_members(get: Callable[..., Any], tensors: Collection[str]) -> dict[str, Any]:
        """Return members that files do not hold: chunks, positions and temperature.

        As in llama.cpp, they are those of Scout and Maverick, and a window of 0 tokens marks models
        that have none of them.
        """
        members: dict[str, Any] = {"use_qk_norm": get("expert_count", 0) != _MAVERICKS_EXPERTS}
        if get("attention.sliding_window", 1) == 0:
            count = get("block_count")
            members |= {"attention_chunk_size": None, "no_rope_layers": [1] * count}
        return members

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        count = config.num_hidden_layers
        for name in ("interleave_moe_layer_step", "no_rope_layer_interval"):
            if getattr(config, name) < 1:
                raise ValueError(f"{name} must be more than 0; download the model again")
        every, first = config.no_rope_layer_interval, config.interleave_moe_layer_step - 1
        turned = config.no_rope_layers or [int((layer + 1) % every != 0) for layer in range(count)]
        moe_layers = config.moe_layers
        if moe_layers is None:
            moe_layers = list(range(first, count, first + 1))
        kinds = getattr(config, "layer_types", None)
        if kinds is None:
            kinds = [_CHUNKED if has_positions else _WHOLE for has_positions in turned]
        for name, values in (("no_rope_layers", turned), ("layer_types", kinds)):
            if not isinstance(values, list) or len(values) != count:
                raise ValueError(
                    f"{name} must have an entry for each layer; download the model again"
                )
        for kind in kinds:
            if kind not in (_CHUNKED, _WHOLE):
                raise ValueError(
                    f"layer_types must be {_CHUNKED} or {_WHOLE}, got {kind!r:.60}; download the "
                    "model again"
                )
        chunk = config.attention_chunk_size
        if chunk is not None:
            check_size("attention_chunk_size", chunk)
        return {
            "no_rope_layers": turned,
            "moe_layers": moe_layers,
            "windows": [chunk if kind == _CHUNKED else None for kind in kinds],
        }

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        return take_apart(renamed(tensors, _NAMES), _MERGED)

    def make_rotaries(self) -> Sequence[nn.Module]:
        config, tables = self.config, super().make_rotaries()
        if not config.attn_temperature_tuning:
            return tables
        return [*tables, QuerySharpening(config.attn_scale, config.floor_scale)]

    def make_attention(self, layer: int) -> nn.Module:
        config = self.config
        settings: dict[str, Any] = {
            "qkv_bias": config.attention_bias,
            "o_bias": config.attention_bias,
            "chunked": config.windows[layer] is not None,
        }
        if not config.no_rope_layers[layer]:
            kind = UnturnedAttention if config.attn_temperature_tuning else SelfAttention
            rotary = 1 if config.attn_temperature_tuning else None
            return kind(config, layer, rotary=rotary, **settings)
        # Transformers normalises after the rotation, which gives the same result.
        norms = [UnweightedRMSNorm(config.norm_eps) if config.use_qk_norm else None] * 2
        return SelfAttention(
            config, layer, q_norm=norms[0], k_norm=norms[1], interleaved=True, **settings
        )

    def make_mlp(self, layer: int) -> nn.Module:
        config = self.config
        size = config.hidden_size
        if layer not in config.moe_layers:
            return GatedMLP(size, config.intermediate_size_mlp, activation=config.activation)
        routing = Routing(
            config.num_local_experts, config.num_experts_per_tok, "sigmoid", renormalized=False
        )
        return SparseMoE(
            Router(size, routing),
            FusedMoE(
                size,
                config.intermediate_size,
                config.num_local_experts,
                weighs_input=True,
                activation=config.activation,
            ),
            GatedMLP(size, config.intermediate_size, activation=config.activation),
        )
