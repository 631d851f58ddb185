"""Nemotron-H (arXiv:2504.03624): each layer is one of Mamba 2, attention that knows no positions,
or a feed-forward of squared ReLUs without a gate.
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
from ..layers.linear import StoredTensor
from ..layers.mlp import MLP
from ..layers.rotary import Rotations
from ..layers.self_attention import SelfAttention
from .causal_lm import CausalLM, gguf_names
from .checkpoint import from_llama_cpp, renamed
from .hybrid import (
    GGUF_MAMBA,
    GGUF_MAMBA_KEYS,
    Mamba2Config,
    kinds_of_layers,
    mamba2_mixer,
    mamba_fields,
)

ARCHITECTURE = "NemotronHForCausalLM"
MODEL_TYPE = "nemotron_h"
GGUF_ARCHITECTURE = "nemotron_h"

_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""Of `hybrid_override_pattern`."""
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


class FeedForward(MLP):
    def forward(self, x: torch.Tensor, rotations: Rotations | None = None) -> torch.Tensor:
        return super().forward(x)


class NemotronHForCausalLM(CausalLM):
    config_class: ClassVar[type[ModelConfig]] = NemotronHConfig
    config_defaults: ClassVar = {
        **CausalLM.config_defaults,
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 21504,
        # As many as there are kinds of them.
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
            # Without positions it is no matter in which order a head's rows stand.
            "attn_q": "mixer.q_proj",
            "attn_k": "mixer.k_proj",
            "attn_v": "mixer.v_proj",
            "attn_output": "mixer.o_proj",
            "ffn_up": "mixer.up_proj",
            "ffn_down": "mixer.down_proj",
        }
    )
    gguf_keys: ClassVar[dict[str, str]] = GGUF_MAMBA_KEYS
    gguf_lists: ClassVar[tuple[str, ...]] = ("feed_forward_length",)

    @staticmethod
    def gguf_members(get: Callable[..., Any], tensors: Collection[str]) -> dict[str, Any]:
        def of_layers(key: str) -> list[Any]:
            value = get(key, 0, list)
            return value if isinstance(value, list) else [value] * get("block_count")

        counts = zip(
            of_layers("attention.head_count_kv"), of_layers("feed_forward_length"), strict=False
        )
        return {
            "layer_types": [
                "full_attention" if heads else "mlp" if columns else "linear_attention"
                for heads, columns in counts
            ],
            "mamba_d_head": get("ssm.inner_size") // max(get("ssm.time_step_rank"), 1),
            "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in tensors),
            "mamba_proj_bias": any(name.endswith("ssm_in.bias") for name in tensors),
            "mlp_bias": any(name.endswith("ffn_up.bias") for name in tensors),
        }

    @staticmethod
    def gguf_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        return from_llama_cpp(tensors, "mixer")

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        if (kinds := config.layer_types) is None:
            kinds = [_LETTERS.get(each, each) for each in config.hybrid_override_pattern or ""]
        config.layer_types = [_OLD.get(str(kind), kind) for kind in kinds]
        check_size("num_hidden_layers", count := len(kinds))
        config.num_hidden_layers = count
        if "moe" in kinds:
            raise UnsupportedError(
                "its experts have no gate, and such are not supported; choose another model"
            )
        for name in ("mlp_hidden_act", "mamba_hidden_act"):
            said = getattr(config, name, "silu")
            known = ACTIVATIONS if name == "mlp_hidden_act" else ("silu", "swish")
            if said not in known:
                raise ValueError(
                    f"{name} must be {' or '.join(known)}, got {said!r:.60}; choose another model"
                )
        return {
            **kinds_of_layers(config, ("linear_attention", "full_attention", "mlp"), ()),
            **mamba_fields(config, config.mamba_n_heads * config.mamba_d_head),
            "num_layers": count,
            "windows": [None] * count,
        }

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        names = {
            # Layers that predict more than the next token.
            r"^mtp\..*": "",
            r"^(backbone|model)\.embeddings\.": "model.embed_tokens.",
            r"^(backbone|model)\.norm_f\.": "model.norm.",
            r"^backbone\.": "model.",
        }
        return renamed(tensors, names)

    def make_rotaries(self) -> Sequence[nn.Module]:
        return []

    def make_layer(self, layer: int) -> nn.Module:
        config = self.config
        match config.layer_types[layer]:
            case "linear_attention":
                return MixerLayer(config, mamba2_mixer(config, layer))
            case "full_attention":
                return MixerLayer(config, SelfAttention(config, layer, rotary=None))
        size, between = config.hidden_size, config.intermediate_size
        activation = ACTIVATIONS[config.mlp_hidden_act]
        return MixerLayer(config, FeedForward(size, between, activation, bias=config.mlp_bias))
