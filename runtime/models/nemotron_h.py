"""Nemotron-H (arXiv:2504.03624) and Nemotron 3: each layer is Mamba 2, attention without positions,
a feed-forward of squared ReLUs without a gate, or a mixture of experts of that kind.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ..config.model import ModelConfig, check_size
from ..config.model_registry import UnsupportedError
from ..layers.activation import ACTIVATIONS
from ..layers.decoder import MixerLayer
from ..layers.linear import Linear, StoredTensor
from ..layers.mlp import MLP
from ..layers.moe import FusedMoE, Router, Routing, SparseMoE
from ..layers.rotary import Rotations
from ..layers.self_attention import SelfAttention
from .causal_lm import CausalLM, gguf_names
from .checkpoint import from_llama_cpp, renamed, within_layers
from .deepseek_v2 import CORRECTION, GGUF_SHARED_EXPERTS
from .experts import Merged, take_apart
from .hybrid import (
    GGUF_MAMBA,
    GGUF_MAMBA_KEYS,
    Mamba2Config,
    kinds_of_layers,
    mamba2_mixer,
    mamba_fields,
)
from .qwen3_moe import GGUF_EXPERTS

ARCHITECTURE = "NemotronHForCausalLM"
MODEL_TYPE = "nemotron_h"
GGUF_ARCHITECTURE = "nemotron_h"
ALSO_GGUF_ARCHITECTURE = "nemotron_h_moe"

# Letters in `hybrid_override_pattern`.
_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
# The layout that transformers uses for experts in memory.
_MERGED = {name: Merged((name,)) for name in ("up_proj", "down_proj")}
_OLD = {"mamba": "linear_attention", "attention": "full_attention"}


@dataclass(frozen=True, slots=True, kw_only=True)
class NemotronHConfig(Mamba2Config):
    layer_types: list[str] | None = None
    hybrid_override_pattern: str | None = None
    mamba_n_groups: int = 8
    mamba_d_state: int = 128
    mamba_d_head: int = 64
    mlp_hidden_act: str = "relu2"
    mlp_bias: bool = False
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 7688
    moe_shared_expert_intermediate_size: int = 7688
    moe_latent_size: int | None = None
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True

    def __post_init__(self) -> None:
        Mamba2Config.__post_init__(self)
        self.check_positive("moe_shared_expert_intermediate_size", "moe_latent_size")


class FeedForward(MLP):
    def forward(self, x: torch.Tensor, rotations: Rotations | None = None) -> torch.Tensor:
        return super().forward(x)


class Mixture(SparseMoE):
    """A mixture of experts. `config` is a `NemotronHConfig`.

    The experts may read a projection of x to fewer numbers. The shared expert reads x.
    """

    def __init__(self, config: Any) -> None:
        size, latent = config.hidden_size, config.moe_latent_size
        routing = Routing(
            config.n_routed_experts,
            config.num_experts_per_tok,
            "sigmoid",
            config.norm_topk_prob,
            config.n_group,
            config.topk_group,
            config.routed_scaling_factor,
        )
        width, shared = config.moe_intermediate_size, config.moe_shared_expert_intermediate_size
        activation = config.mlp_hidden_act
        experts = FusedMoE(latent or size, width, config.n_routed_experts, activation=activation)
        super().__init__(
            Router(size, routing, correction=True),
            experts,
            MLP(size, shared, ACTIVATIONS[activation], bias=config.mlp_bias),
        )
        self.fc1_latent_proj = Linear(size, latent) if latent else nn.Identity()
        self.fc2_latent_proj = Linear(latent, size) if latent else nn.Identity()

    def forward(self, x: torch.Tensor, rotations: Rotations | None = None) -> torch.Tensor:
        assert self.shared_experts is not None
        chosen: torch.Tensor = self.experts(self.fc1_latent_proj(x), *self.gate.choose(x))
        # On several ranks this and the result of the shared expert are summands.
        result: torch.Tensor = self.fc2_latent_proj(chosen) + self.shared_experts(x)
        return result


class NemotronHForCausalLM(CausalLM):
    config_class: ClassVar[type[ModelConfig]] = NemotronHConfig
    config_defaults: ClassVar = {
        **CausalLM.config_defaults,
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 21504,
        # One for each kind.
        "num_hidden_layers": 0,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    }
    config_names: ClassVar[dict[str, str]] = {
        "layers_block_type": "layer_types",
        "mamba_num_heads": "mamba_n_heads",
        "mamba_head_dim": "mamba_d_head",
        "n_groups": "mamba_n_groups",
        "ssm_state_size": "mamba_d_state",
        "conv_kernel": "mamba_d_conv",
        "use_conv_bias": "mamba_conv_bias",
        "use_bias": "mamba_proj_bias",
        "layer_norm_epsilon": "rms_norm_eps",
    }

    gguf_names: ClassVar[dict[str, str]] = gguf_names(
        {
            "attn_norm": "norm",
            **{key: name.replace("mamba.", "mixer.") for key, name in GGUF_MAMBA.items()},
            # Without positions the order of the rows of a head does not matter.
            "attn_q": "mixer.q_proj",
            "attn_k": "mixer.k_proj",
            "attn_v": "mixer.v_proj",
            "attn_output": "mixer.o_proj",
            "ffn_up": "mixer.up_proj",
            "ffn_down": "mixer.down_proj",
            **{key: name.replace("mlp.", "mixer.") for key, name in GGUF_EXPERTS.items()},
            **{key: name.replace("mlp.", "mixer.") for key, name in GGUF_SHARED_EXPERTS.items()},
            "ffn_latent_down": "mixer.fc1_latent_proj",
            "ffn_latent_up": "mixer.fc2_latent_proj",
        }
    )
    gguf_keys: ClassVar[dict[str, str]] = {
        **GGUF_MAMBA_KEYS,
        "expert_count": "n_routed_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
        "expert_weights_scale": "routed_scaling_factor",
        "expert_weights_norm": "norm_topk_prob",
        "expert_group_count": "n_group",
        "expert_group_used_count": "topk_group",
        "moe_latent_size": "moe_latent_size",
    }
    gguf_lists: ClassVar[tuple[str, ...]] = ("feed_forward_length",)

    @staticmethod
    def gguf_members(get: Callable[..., Any], tensors: Collection[str]) -> dict[str, Any]:
        def of_layers(key: str) -> list[Any]:
            value = get(key, 0, list)
            return value if isinstance(value, list) else [value] * get("block_count")

        heads, columns = of_layers("attention.head_count_kv"), of_layers("feed_forward_length")
        count = get("block_count") - get("nextn_predict_layers", 0)

        def kind(layer: int) -> str:
            if heads[layer]:
                return "full_attention"
            if columns[layer]:
                return "moe" if f"blk.{layer}.ffn_gate_inp.weight" in tensors else "mlp"
            return "linear_attention"

        return {
            "layer_types": [kind(layer) for layer in range(min(count, len(heads), len(columns)))],
            "mamba_d_head": get("ssm.inner_size") // max(get("ssm.time_step_rank"), 1),
            "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in tensors),
            "mamba_proj_bias": any(name.endswith("ssm_in.bias") for name in tensors),
            "mlp_bias": any(name.endswith("ffn_up.bias") for name in tensors),
        }

    @staticmethod
    def gguf_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        return renamed(
            from_llama_cpp(within_layers(tensors, config.num_layers), "mixer"), CORRECTION
        )

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        if (kinds := config.layer_types) is None:
            kinds = [_LETTERS.get(each, each) for each in config.hybrid_override_pattern or ""]
        config.layer_types = [_OLD.get(str(kind), kind) for kind in kinds]
        check_size("num_hidden_layers", count := len(kinds))
        config.num_hidden_layers = count
        if "moe" in kinds and config.mlp_hidden_act != "relu2":
            raise UnsupportedError(
                f"experts with the activation {config.mlp_hidden_act!r:.60} are not supported; "
                "choose another model"
            )
        if "moe" in kinds and config.moe_latent_size and config.mlp_bias:
            raise UnsupportedError(
                "experts with moe_latent_size and mlp_bias are not supported; choose another model"
            )
        for name in ("mlp_hidden_act", "mamba_hidden_act"):
            said = getattr(config, name, "silu")
            known = ACTIVATIONS if name == "mlp_hidden_act" else ("silu", "swish")
            if said not in known:
                raise ValueError(
                    f"{name} must be {' or '.join(known)}, got {said!r:.60}; choose another model"
                )
        return {
            **kinds_of_layers(config, tuple(_LETTERS.values()), ()),
            **mamba_fields(config, config.mamba_n_heads * config.mamba_d_head),
            "num_layers": count,
            "windows": [None] * count,
        }

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        names = {
            # Layers that predict further tokens.
            r"^mtp\..*": "",
            r"^(backbone|model)\.embeddings\.": "model.embed_tokens.",
            r"^(backbone|model)\.norm_f\.": "model.norm.",
            r"^backbone\.": "model.",
        }
        return take_apart(renamed(tensors, names), _MERGED)

    def make_rotaries(self) -> Sequence[nn.Module]:
        return []

    def make_layer(self, layer: int) -> nn.Module:
        config = self.config
        match config.layer_types[layer]:
            case "linear_attention":
                return MixerLayer(config, mamba2_mixer(config, layer))
            case "full_attention":
                return MixerLayer(config, SelfAttention(config, layer, rotary=None))
            case "moe":
                return MixerLayer(config, Mixture(config))
        size, between = config.hidden_size, config.intermediate_size
        activation = ACTIVATIONS[config.mlp_hidden_act]
        return MixerLayer(config, FeedForward(size, between, activation, bias=config.mlp_bias))
