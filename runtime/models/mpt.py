"""MPT (MosaicML): ALiBi in place of positions, LayerNorms and linear layers that mostly have no
biases, and in some models queries, keys and values that are clamped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import nn

from ..config.model import ModelConfig
from ..config.model_registry import UnsupportedError
from ..config.rope import number
from ..layers.activation import ACTIVATIONS
from ..layers.alibi import alibi_slope
from ..layers.linear import StoredTensor
from ..layers.mlp import MLP
from ..layers.norm import LayerNorm
from ..layers.self_attention import SelfAttention
from .causal_lm import CausalLM
from .checkpoint import renamed
from .phi3 import unfused_layers

ARCHITECTURE = "MptForCausalLM"
MODEL_TYPE = "mpt"
ALSO_ARCHITECTURE = "MPTForCausalLM"
GGUF_ARCHITECTURE = "mpt"

_MODULES = {
    r"^transformer\.wte\.": "model.embed_tokens.",
    r"^transformer\.norm_f\.": "model.norm.",
    r"^transformer\.blocks\.": "model.layers.",
}
_PARTS = {
    r"\.norm_1\.": ".input_layernorm.",
    r"\.norm_2\.": ".post_attention_layernorm.",
    r"\.attn\.Wqkv\.": ".self_attn.qkv_proj.",
    r"\.attn\.out_proj\.": ".self_attn.o_proj.",
    r"\.ffn\.": ".mlp.",
}
# The only supported values of members that differ in other models.
_ONLY: dict[str, Any] = {
    "attn_type": "multihead_attention",
    "alibi": True,
    "qk_ln": False,
    "prefix_lm": False,
    "logit_scale": None,
}
_NUMBERS = ("clip_qkv", "softmax_scale", "alibi_bias_max")


@dataclass(frozen=True, slots=True, kw_only=True)
class MptConfig(ModelConfig):
    no_bias: bool = True
    expansion_ratio: int = 4
    clip_qkv: float | None = None
    softmax_scale: float | None = None
    alibi_bias_max: float = 8.0

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        self.check_positive("clip_qkv", "softmax_scale", "alibi_bias_max")


class MptForCausalLM(CausalLM):
    config_class: ClassVar[type[ModelConfig]] = MptConfig
    config_defaults: ClassVar = {
        **CausalLM.config_defaults,
        "intermediate_size": 0,
        "hidden_act": "gelu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "attn_config": None,
        "logit_scale": None,
    }
    config_names: ClassVar[dict[str, str]] = {
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "max_seq_len": "max_position_embeddings",
        "layer_norm_epsilon": "rms_norm_eps",
    }

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        attention = config.attn_config or {}
        if not isinstance(attention, dict):
            raise ValueError(
                f"attn_config must be an object, got {attention!r:.60}; download the model again"
            )
        asked = {**_ONLY, **attention, "logit_scale": config.logit_scale}
        heads = config.num_attention_heads
        for name, only in {**_ONLY, "kv_n_heads": heads}.items():
            if (value := asked.get(name)) is not None and value != only:
                raise UnsupportedError(
                    f"{name} {value!r:.60} is not supported; choose another model"
                )
        numbers = {name: attention[name] for name in _NUMBERS if attention.get(name) is not None}
        return {
            "num_kv_heads": heads,
            "intermediate_size": config.expansion_ratio * config.hidden_size,
            **{name: number(name, value) for name, value in numbers.items()},
        }

    @staticmethod
    def gguf_members(get: Callable[..., Any], tensors: Collection[str]) -> dict[str, Any]:
        steepest = get("attention.max_alibi_bias", 0.0, float)
        return {
            "no_bias": "blk.0.attn_qkv.bias" not in tensors,
            "attn_config": {
                "clip_qkv": get("attention.clamp_kqv", 0.0, float) or None,
                "alibi": steepest > 0,
                "alibi_bias_max": steepest,
            },
        }

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
        return unfused_layers(config, renamed(renamed(tensors, _MODULES), _PARTS))

    @staticmethod
    def gguf_tensors(config: Any, tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
        return unfused_layers(config, tensors)

    def make_rotaries(self) -> Sequence[nn.Module]:
        return []

    def make_norm(self) -> nn.Module:
        config = self.config
        return LayerNorm(config.hidden_size, eps=config.norm_eps, bias=not config.no_bias)

    def make_attention(self, layer: int) -> nn.Module:
        config = self.config
        return SelfAttention(
            config,
            layer,
            qkv_bias=not config.no_bias,
            o_bias=not config.no_bias,
            rotary=None,
            scale=config.softmax_scale,
            slopes=partial(alibi_slope, heads=config.num_heads, steepest=config.alibi_bias_max),
            bound=config.clip_qkv,
        )

    def make_mlp(self, layer: int) -> nn.Module:
        config = self.config
        sizes = config.hidden_size, config.intermediate_size
        return MLP(*sizes, ACTIVATIONS[config.activation], bias=not config.no_bias)
