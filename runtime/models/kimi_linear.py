"""Kimi Linear (arXiv:2510.26692): Kimi Delta Attention in three of four layers, latent attention
without positions in the fourth, and mixtures of experts as in DeepSeek V3. Kimi Delta Attention is
a Gated DeltaNet with a decay for each number of a key.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch
from torch import nn

from ..config.model import ModelConfig, check_size
from ..config.model_registry import UnsupportedError
from ..layers.decoder import DecoderLayer
from ..layers.gated_delta_net import DeltaSizes, GatedDeltaNet
from ..layers.latent_attention import LatentAttention
from ..layers.linear import FusedLinear, Linear, StoredTensor
from ..layers.norm import GatedRMSNorm
from ..layers.rotary import Rotations
from .causal_lm import gguf_names
from .checkpoint import changed, from_llama_cpp, joined, renamed
from .deepseek_v2 import DeepseekV2ForCausalLM
from .deepseek_v3 import DeepseekV3Config, DeepseekV3ForCausalLM
from .hybrid import check_columns, kinds_in_gguf, kinds_of_layers
from .olmo_hybrid import CONVOLUTIONS

ARCHITECTURE = "KimiLinearForCausalLM"
MODEL_TYPE = "kimi_linear"
GGUF_ARCHITECTURE = "kimi-linear"

_EXPERTS = {r"\.w1\.": ".gate_proj.", r"\.w3\.": ".up_proj.", r"\.w2\.": ".down_proj."}
# Names in transformers of the members of `linear_attn_config`.
_LINEAR = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
# Members that have these values in all models of this code.
_FIXED = {"mla_use_nope": True, "moe_router_activation_func": "sigmoid", "moe_layer_freq": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiLinearConfig(DeepseekV3Config):
    q_lora_rank: int | None = None
    moe_intermediate_size: int = 1024
    first_k_dense_replace: int = 1
    routed_scaling_factor: float = 2.446
    n_group: int = 1
    topk_group: int = 1
    layer_types: list[str] | None = None
    mlp_layer_types: list[str] | None = None
    linear_attn_config: dict[str, Any] | None = None
    linear_head_dim: int = 128
    linear_num_heads: int = 32
    linear_conv_kernel_dim: int = 4

    def __post_init__(self) -> None:
        DeepseekV3Config.__post_init__(self)
        self.check_positive("linear_head_dim", "linear_num_heads")
        check_columns("linear_conv_kernel_dim", self.linear_conv_kernel_dim)


class KimiDeltaNet(GatedDeltaNet):
    """The decays and the gates of the result are products of two projections."""

    def __init__(self, layer: int, config: KimiLinearConfig) -> None:
        heads, size = config.linear_num_heads, config.linear_head_dim
        sizes = DeltaSizes(heads, heads, size, size, config.linear_conv_kernel_dim, decays=size)
        super().__init__(layer, config.hidden_size, sizes, config.norm_eps)
        self.norm = GatedRMSNorm(size, config.norm_eps, norm_first=True, activation=torch.sigmoid)
        hidden, inner = config.hidden_size, heads * size
        self.qkv_proj = FusedLinear(hidden, dict.fromkeys(("q_proj", "k_proj", "v_proj"), inner))
        self.b_proj = Linear(hidden, heads)
        self.fg_a_proj = FusedLinear(hidden, {"f_a_proj": size, "g_a_proj": size})
        self.f_b_proj, self.g_b_proj = Linear(size, inner), Linear(size, inner)

    def sections(self) -> dict[Linear, dict[str, list[int]]]:
        keys, heads = self.sizes.keys, self.sizes.value_heads
        return {
            self.qkv_proj: {part: [keys] for part in self.qkv_proj.parts},
            self.b_proj: {"": [heads]},
            self.f_b_proj: {"": [keys]},
            self.g_b_proj: {"": [keys]},
        }

    def project(
        self, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        decays, gate = self.fg_a_proj(x).chunk(2, dim=-1)
        return self.qkv_proj(x), self.g_b_proj(gate), self.b_proj(x), self.f_b_proj(decays)


class UnturnedLatentAttention(LatentAttention):
    """Latent attention without positions."""

    def turn(self, heads: torch.Tensor, rotations: Rotations) -> torch.Tensor:
        return heads


class KimiLinearForCausalLM(DeepseekV3ForCausalLM):
    config_class: ClassVar[type[ModelConfig]] = KimiLinearConfig
    attention_class: ClassVar[type[LatentAttention]] = UnturnedLatentAttention
    config_defaults: ClassVar = {
        **DeepseekV3ForCausalLM.config_defaults,
        "max_position_embeddings": 1048576,
        "rms_norm_eps": 1e-5,
    }
    config_names: ClassVar[dict[str, str]] = {
        "model_max_length": "max_position_embeddings",
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
        "num_experts": "n_routed_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
    }
    gguf_names: ClassVar[dict[str, str]] = {
        **DeepseekV3ForCausalLM.gguf_names,
        **gguf_names(
            {
                "ssm_conv1d_q": "self_attn.q_conv1d",
                "ssm_conv1d_k": "self_attn.k_conv1d",
                "ssm_conv1d_v": "self_attn.v_conv1d",
                "ssm_f_a": "self_attn.f_a_proj",
                "ssm_f_b": "self_attn.f_b_proj",
                "ssm_g_a": "self_attn.g_a_proj",
                "ssm_g_b": "self_attn.g_b_proj",
                "ssm_beta": "self_attn.b_proj",
                "ssm_dt": "self_attn.dt_proj",
                "ssm_norm": "self_attn.norm",
            }
        ),
    }
    gguf_keys: ClassVar[dict[str, str]] = {
        **DeepseekV3ForCausalLM.gguf_keys,
        "kda.head_dim": "linear_head_dim",
        "ssm.conv_kernel": "linear_conv_kernel_dim",
    }

    @staticmethod
    def fits_gguf(get: Callable[..., Any]) -> bool:
        return True

    @staticmethod
    def gguf_members(get: Callable[..., Any], tensors: Collection[str]) -> dict[str, Any]:
        members = DeepseekV2ForCausalLM.gguf_members(get, tensors)
        # This member follows from the first layer, which has no latent attention here.
        del members["q_lora_rank"]
        return {
            **members,
            **kinds_in_gguf(get, "linear_attention"),
            "linear_num_heads": get("attention.head_count"),
            "norm_topk_prob": bool(get("expert_weights_norm", True)),
        }

    @staticmethod
    def gguf_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        found = DeepseekV3ForCausalLM.gguf_tensors(config, from_llama_cpp(tensors, "self_attn"))
        return _as_modules(config, found)

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        for name, value in _FIXED.items():
            if (said := getattr(config, name, value)) != value:
                raise UnsupportedError(
                    f"{name} is {said!r:.60}, where only {value!r} is supported; choose another "
                    "model"
                )
        kinds, nested = config.mlp_layer_types, config.linear_attn_config or {}
        count = config.num_hidden_layers
        if kinds is not None and (
            len(kinds) != count or any(k not in ("dense", "sparse") for k in kinds)
        ):
            raise ValueError(
                "mlp_layer_types must have dense or sparse for each layer; download the model again"
            )
        sizes = {ours: nested.get(name, getattr(config, ours)) for name, ours in _LINEAR.items()}
        for name, size in sizes.items():
            if type(size) is not int:
                raise ValueError(
                    f"{name} must be a whole number, got {size!r:.60}; download the model again"
                )
            check_size(name, size)
        # Counted from 1.
        full = nested.get("full_attn_layers")
        full = full if isinstance(full, list) else range(5, count + 1, 4)
        default = [
            "full_attention" if layer in full else "linear_attention"
            for layer in range(1, count + 1)
        ]
        return {
            **DeepseekV3ForCausalLM.config_fields(config),
            **kinds_of_layers(config, ("linear_attention", "full_attention"), default),
            **sizes,
        }

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        names = {r"\.block_sparse_moe\.": ".mlp.", r"\.o_norm\.": ".norm."}
        found = renamed(renamed(tensors, names), _EXPERTS)
        return _as_modules(config, DeepseekV3ForCausalLM.checkpoint_tensors(config, found))

    def make_rotaries(self) -> Sequence[nn.Module]:
        """Return no tables, because the model uses no positions."""
        return []

    def has_experts(self, layer: int) -> bool:
        kinds = self.config.mlp_layer_types
        return super().has_experts(layer) if kinds is None else kinds[layer] == "sparse"

    def make_layer(self, layer: int) -> nn.Module:
        config = self.config
        is_full = config.layer_types[layer] == "full_attention"
        mixer = self.make_attention(layer) if is_full else KimiDeltaNet(layer, config)
        return DecoderLayer(config, mixer, self.make_mlp(layer))


def _as_modules(config: Any, tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
    """Convert the tensors of Kimi Delta Attention to the shapes of `GatedDeltaNet`."""
    kinds = enumerate(config.layer_types)
    layers = "|".join(str(layer) for layer, kind in kinds if kind == "linear_attention")
    found, size = [], config.linear_head_dim
    owner = rf"^(model\.layers\.(?:{layers})\.self_attn\.)"
    for tensor in renamed(tensors, {rf"{owner}o_proj\.": r"\1out_proj."}):
        own, count = tensor.name.rpartition(".self_attn.")[2], prod(tensor.shape)
        if own == "A_log":
            tensor = changed(tensor, (count,))
        elif own == "dt_bias" and count % size == 0:
            tensor = changed(tensor, (count // size, size))
        elif own in CONVOLUTIONS and len(tensor.shape) > 1:
            columns = tensor.shape[-1]
            tensor = changed(tensor, (count // max(columns, 1), 1, columns))
        found.append(tensor)
    return joined(found, "conv1d.weight", CONVOLUTIONS)
