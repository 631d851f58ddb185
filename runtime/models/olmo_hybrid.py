"""OLMo Hybrid (Ai2): Gated DeltaNet with a write strength of up to 2 in three of four layers, and
the layer of OLMo 3, mostly without positions, in the fourth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ..config.model import ModelConfig
from ..layers.decoder import DecoderLayer
from ..layers.gated_delta_net import DeltaSizes, GatedDeltaNet
from ..layers.linear import FusedLinear, Linear, StoredTensor
from ..layers.norm import AllHeadsRMSNorm
from ..layers.self_attention import SelfAttention
from .causal_lm import CausalLM
from .checkpoint import joined, renamed
from .hybrid import check_delta, delta_sizes, every_nth, kinds_of_layers
from .olmo2 import Olmo2Layer

ARCHITECTURE = "OlmoHybridForCausalLM"
MODEL_TYPE = "olmo_hybrid"

CONVOLUTIONS = ("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight")
_NAMES = {
    r"\.attention_layer_norm\.": ".input_layernorm.",
    r"\.feedforward_layer_norm\.": ".post_attention_layernorm.",
    r"\.linear_attn\.o_norm\.": ".linear_attn.norm.",
    r"\.linear_attn\.o_proj\.": ".linear_attn.out_proj.",
}
_DELTA_EPS = 1e-5  # Epsilon of the norm in a Gated DeltaNet, independent of that of other norms.


@dataclass(frozen=True, slots=True, kw_only=True)
class OlmoHybridConfig(ModelConfig):
    """`has_positions`: whether attention rotates queries and keys."""

    layer_types: list[str] | None = None
    attention_bias: bool = False
    linear_num_key_heads: int | None = None
    linear_num_value_heads: int | None = None
    linear_key_head_dim: int | None = None
    linear_value_head_dim: int | None = None
    linear_conv_kernel_dim: int = 4
    linear_allow_neg_eigval: bool = True
    has_positions: bool = True

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        check_delta(self)

    @property
    def delta(self) -> DeltaSizes:
        """The sizes of a Gated DeltaNet."""
        return delta_sizes(self)._replace(most_written=1.0 + self.linear_allow_neg_eigval)


class OlmoDeltaNet(GatedDeltaNet):
    def __init__(self, layer: int, hidden_size: int, sizes: DeltaSizes, eps: float) -> None:
        super().__init__(layer, hidden_size, sizes, eps)
        keys, values, heads = sizes.keys, sizes.values, sizes.value_heads
        self.qkvg_proj = FusedLinear(
            hidden_size, {"q_proj": keys, "k_proj": keys, "v_proj": values, "g_proj": values}
        )
        self.ba_proj = FusedLinear(hidden_size, {"b_proj": heads, "a_proj": heads})

    def sections(self) -> dict[Linear, dict[str, list[int]]]:
        linears: tuple[FusedLinear, ...] = self.qkvg_proj, self.ba_proj
        return {each: {part: [rows] for part, rows in each.parts.items()} for each in linears}

    def project(
        self, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        qkv, gate = self.qkvg_proj(x).tensor_split([-self.sizes.values], dim=-1)
        b, a = self.ba_proj(x).chunk(2, dim=-1)
        return qkv, gate, b, a


class OlmoHybridForCausalLM(CausalLM):
    config_class: ClassVar[type[ModelConfig]] = OlmoHybridConfig
    config_defaults: ClassVar = {
        **CausalLM.config_defaults,
        "max_position_embeddings": 65536,
    }

    @staticmethod
    def rope_parameters(content: dict[str, Any]) -> Any:
        return CausalLM.rope_parameters(content) if _has_positions(content) else {"rope_theta": 1e4}

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        heads = config.num_attention_heads
        key_heads = heads if config.linear_num_key_heads is None else config.linear_num_key_heads
        key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        if key_dim is None:
            key_dim = int(0.75 * config.hidden_size / max(key_heads, 1))
        value_heads = config.linear_num_value_heads
        return {
            **kinds_of_layers(
                config,
                ("linear_attention", "full_attention"),
                every_nth(config, 4, "linear_attention"),
            ),
            "linear_num_key_heads": key_heads,
            "linear_num_value_heads": heads if value_heads is None else value_heads,
            "linear_key_head_dim": key_dim,
            "linear_value_head_dim": 2 * key_dim if value_dim is None else value_dim,
            "has_positions": _has_positions(vars(config)),
        }

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        return joined(renamed(tensors, _NAMES), "conv1d.weight", CONVOLUTIONS)

    def make_rotaries(self) -> Sequence[nn.Module]:
        """Return no tables for a model without positions, because long tables are large."""
        return super().make_rotaries() if self.config.has_positions else []

    def make_layer(self, layer: int) -> nn.Module:
        config, mlp = self.config, self.make_mlp(layer)
        if config.layer_types[layer] == "full_attention":
            return Olmo2Layer(config, self.make_attention(layer), mlp)
        net = OlmoDeltaNet(layer, config.hidden_size, config.delta, _DELTA_EPS)
        return DecoderLayer(config, net, mlp, "linear_attn")

    def make_attention(self, layer: int) -> nn.Module:
        config = self.config
        return SelfAttention(
            config,
            layer,
            qkv_bias=config.attention_bias,
            o_bias=config.attention_bias,
            q_norm=AllHeadsRMSNorm(config.num_heads * config.head_dim, config.norm_eps),
            k_norm=AllHeadsRMSNorm(config.num_kv_heads * config.head_dim, config.norm_eps),
            rotary=0 if config.has_positions else None,
        )


def _has_positions(content: dict[str, Any]) -> bool:
    """Whether rope_theta in config.json is not null."""
    rope = CausalLM.rope_parameters(content)
    said = content.get("rope_theta", 0)
    return (rope.get("rope_theta", said) if isinstance(rope, dict) else said) is not None
