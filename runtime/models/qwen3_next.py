"""Qwen3-Next: Gated DeltaNet in three of four layers, gated attention in the fourth, and mixtures
of experts with a shared expert.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ..config.model import ModelConfig
from ..layers.decoder import DecoderLayer
from ..layers.gated_delta_net import DeltaSizes, GatedDeltaNet
from ..layers.linear import FusedLinear, Linear, StoredTensor
from ..layers.mlp import GatedMLP
from ..layers.norm import RMSNorm
from ..layers.self_attention import SelfAttention
from .causal_lm import CausalLM, gguf_names
from .checkpoint import from_llama_cpp, plus_one, renamed, within_layers
from .experts import MERGED, take_apart
from .hybrid import check_delta, delta_sizes, every_nth, kinds_of_layers
from .qwen2_moe import Qwen2MoeBlock, Qwen2MoeForCausalLM
from .qwen3_moe import has_experts

ARCHITECTURE = "Qwen3NextForCausalLM"
MODEL_TYPE = "qwen3_next"
GGUF_ARCHITECTURE = "qwen3next"


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3NextConfig(ModelConfig):
    """The members of config.json.

    `qkvz_apart`: GGUF files hold queries, keys and values of all heads one after another, and gates
    as a separate tensor.
    """

    layer_types: list[str] | None = None
    attention_bias: bool = False
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    num_experts: int = 512
    num_experts_per_tok: int = 10
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    norm_topk_prob: bool = True
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None
    qkvz_apart: bool = False

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        check_delta(self)

    @property
    def delta(self) -> DeltaSizes:
        """The sizes of a Gated DeltaNet."""
        return delta_sizes(self)


class ApartDeltaNet(GatedDeltaNet):
    """A Gated DeltaNet with the projections of GGUF files."""

    def __init__(self, layer: int, hidden_size: int, sizes: DeltaSizes, eps: float) -> None:
        super().__init__(layer, hidden_size, sizes, eps)
        self.in_proj_qkvz: Linear = FusedLinear(
            hidden_size, {"in_proj_qkv": 2 * sizes.keys + sizes.values, "in_proj_z": sizes.values}
        )
        self.in_proj_ba = Linear(hidden_size, 2 * sizes.value_heads)

    def sections(self) -> dict[Linear, dict[str, list[int]]]:
        keys, values = self.sizes.keys, self.sizes.values
        qkvz = {"in_proj_qkv": [keys, keys, values], "in_proj_z": [values]}
        return {self.in_proj_qkvz: qkvz, self.in_proj_ba: {"": [2 * self.sizes.value_heads]}}

    def project(
        self, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        qkv, z = self.in_proj_qkvz(x).tensor_split([-self.sizes.values], dim=-1)
        return qkv, z, *self.gates(x)

    def gates(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return b and a of each head. Those of one key head lie side by side in the projection."""
        b, a = self.in_proj_ba(x).unflatten(-1, (self.sizes.key_heads, 2, -1)).unbind(2)
        return b.flatten(1), a.flatten(1)


class NextDeltaNet(ApartDeltaNet):
    """A Gated DeltaNet whose projections hold the rows of one key head side by side."""

    def __init__(self, layer: int, hidden_size: int, sizes: DeltaSizes, eps: float) -> None:
        super().__init__(layer, hidden_size, sizes, eps)
        self.in_proj_qkvz = Linear(hidden_size, 2 * (sizes.keys + sizes.values))

    def sections(self) -> dict[Linear, dict[str, list[int]]]:
        whole = {"": [2 * (self.sizes.keys + self.sizes.values)]}
        return {**super().sections(), self.in_proj_qkvz: whole}

    def project(
        self, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        heads, size = self.sizes.key_heads, self.sizes.key_dim
        values = self.sizes.values // heads
        qkvz = self.in_proj_qkvz(x).unflatten(-1, (heads, -1))
        q, k, v, z = (part.flatten(1) for part in qkvz.split([size, size, values, values], -1))
        return torch.cat((q, k, v), dim=-1), z, *self.gates(x)


# Names of the layer that predicts one token more, as `NextLayer` has them.
_NEXT_LAYER = {
    r"^mtp\.layers\.0\.": "",
    r"^mtp\.pre_fc_norm_embedding\.": "enorm.",
    r"^mtp\.pre_fc_norm_hidden\.": "hnorm.",
    r"^mtp\.fc\.": "eh_proj.",
    r"^mtp\.norm\.": "shared_head.norm.",
    r"^mtp\.": "",
}


class Qwen3NextForCausalLM(CausalLM):
    """The layer that predicts one token more has attention. It is loaded for speculation only."""

    has_next_layer = True
    config_class: ClassVar[type[ModelConfig]] = Qwen3NextConfig
    config_defaults: ClassVar = {
        **CausalLM.config_defaults,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
    }
    takes_partial_rotary = True
    gguf_names: ClassVar[dict[str, str]] = {
        **Qwen2MoeForCausalLM.gguf_names,
        **gguf_names(
            {
                "post_attention_norm": "post_attention_layernorm",
                "attn_qkv": "linear_attn.in_proj_qkv",
                "attn_gate": "linear_attn.in_proj_z",
                "ssm_ba": "linear_attn.in_proj_ba",
                "ssm_conv1d": "linear_attn.conv1d",
                "ssm_dt": "linear_attn.dt_proj",
                "ssm_norm": "linear_attn.norm",
                "ssm_out": "linear_attn.out_proj",
            }
        ),
    }
    gguf_keys: ClassVar[dict[str, str]] = {
        **Qwen2MoeForCausalLM.gguf_keys,
        "ssm.conv_kernel": "linear_conv_kernel_dim",
        "ssm.state_size": "linear_key_head_dim",
        "ssm.group_count": "linear_num_key_heads",
        "ssm.time_step_rank": "linear_num_value_heads",
        "full_attention_interval": "full_attention_interval",
    }

    @staticmethod
    def gguf_members(get: Callable[..., Any], tensors: Collection[str]) -> dict[str, Any]:
        heads = max(get("ssm.time_step_rank"), 1)
        return {"linear_value_head_dim": get("ssm.inner_size") // heads, "qkvz_apart": True}

    @staticmethod
    def gguf_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        # In GGUF files the weights of norms already include the 1.
        found = from_llama_cpp(tensors, "linear_attn")
        return Qwen2MoeForCausalLM.gguf_tensors(config, found)

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        default = every_nth(config, config.full_attention_interval, "linear_attention")
        return kinds_of_layers(config, ("linear_attention", "full_attention"), default)

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        prefix = f"model.layers.{len(config.layer_types)}."
        names = {pattern: prefix + name for pattern, name in _NEXT_LAYER.items()}
        kept = within_layers(renamed(tensors, names), config.num_layers)
        return take_apart(plus_one(kept, _is_norm), MERGED)

    def make_layer(self, layer: int) -> nn.Module:
        config, mlp = self.config, self.make_mlp(layer)
        if layer == len(config.layer_types) or config.layer_types[layer] == "full_attention":
            return DecoderLayer(config, self.make_attention(layer), mlp)
        net = self.delta_net()(layer, config.hidden_size, config.delta, config.norm_eps)
        return DecoderLayer(config, net, mlp, "linear_attn")

    def delta_net(self) -> type[GatedDeltaNet]:
        return ApartDeltaNet if self.config.qkvz_apart else NextDeltaNet

    def make_attention(self, layer: int) -> nn.Module:
        config = self.config
        return SelfAttention(
            config,
            layer,
            qkv_bias=config.attention_bias,
            o_bias=config.attention_bias,
            q_norm=RMSNorm(config.head_dim, config.norm_eps),
            k_norm=RMSNorm(config.head_dim, config.norm_eps),
            gated=True,
        )

    def make_mlp(self, layer: int) -> nn.Module:
        config = self.config
        if has_experts(config, layer):
            return Qwen2MoeBlock(config)
        return GatedMLP(config.hidden_size, config.intermediate_size, activation=config.activation)


def _is_norm(name: str) -> bool:
    """Whether the weight of a norm is stored less 1."""
    return name.endswith("norm.weight") and not name.endswith(".linear_attn.norm.weight")
