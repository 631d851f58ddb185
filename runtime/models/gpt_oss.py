"""GPT-OSS (arXiv:2508.10925): a sliding window in every other layer, attention sinks, and mixtures
of experts with biases and clamped gates in all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ..config.model import ModelConfig, sliding_windows
from ..config.model_registry import UnsupportedError
from ..layers.linear import StoredTensor
from ..layers.moe import FusedMoE, Router, Routing, SparseMoE
from ..layers.self_attention import SelfAttention
from .causal_lm import GGUF_BLOCK, CausalLM, gguf_names
from .checkpoint import renamed
from .experts import Merged, take_apart
from .qwen3_moe import GGUF_EXPERTS

ARCHITECTURE = "GptOssForCausalLM"
MODEL_TYPE = "gpt_oss"
GGUF_ARCHITECTURE = "gpt-oss"

_BOTH = ("gate_proj", "up_proj")
_MERGED = {
    "gate_up_proj": Merged(_BOTH, transposed=True, interleaved=True),
    "gate_up_proj_bias": Merged(_BOTH, "bias", interleaved=True),
    "gate_up_proj_blocks": Merged(_BOTH, "blocks", interleaved=True),
    "gate_up_proj_scales": Merged(_BOTH, "scales", interleaved=True),
    "down_proj": Merged(("down_proj",), transposed=True),
    "down_proj_bias": Merged(("down_proj",), "bias"),
    "down_proj_blocks": Merged(("down_proj",), "blocks"),
    "down_proj_scales": Merged(("down_proj",), "scales"),
}
_STEEPNESS = 1.702


@dataclass(frozen=True, slots=True, kw_only=True)
class GptOssConfig(ModelConfig):
    attention_bias: bool = True
    num_local_experts: int = 128
    num_experts_per_tok: int = 4
    swiglu_alpha: float = _STEEPNESS
    swiglu_limit: float = 7.0


class GptOssForCausalLM(CausalLM):
    config_class: ClassVar[type[ModelConfig]] = GptOssConfig
    config_defaults: ClassVar = {
        **CausalLM.config_defaults,
        "head_dim": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "sliding_window": 128,
    }
    gguf_names: ClassVar[dict[str, str]] = gguf_names(
        {
            **GGUF_BLOCK,
            **GGUF_EXPERTS,
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks": "self_attn.sinks",
        }
    )
    gguf_keys: ClassVar[dict[str, str]] = {
        "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
    }
    gguf_rope: ClassVar[dict[str, Any]] = {"truncate": False}

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        if config.swiglu_alpha != _STEEPNESS or not config.swiglu_limit > 0:
            raise UnsupportedError(
                f"gates with a swiglu_alpha of {config.swiglu_alpha} and a swiglu_limit of "
                f"{config.swiglu_limit} are not supported; choose another model"
            )
        if getattr(config, "layer_types", None) is not None:
            return {"windows": sliding_windows(config, config.sliding_window, 0)}
        layers = range(config.num_hidden_layers)
        return {"windows": [None if layer % 2 else config.sliding_window for layer in layers]}

    @staticmethod
    def gguf_members(get: Callable[..., Any], tensors: Collection[str]) -> dict[str, Any]:
        return {"sliding_window": get("attention.sliding_window", 128)}

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        return take_apart(renamed(tensors, {r"\.mlp\.router\.": ".mlp.gate."}), _MERGED)

    @staticmethod
    def gguf_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        return renamed(tensors, {r"\.sinks\.weight$": ".sinks"})

    def make_attention(self, layer: int) -> nn.Module:
        biased = self.config.attention_bias
        return SelfAttention(self.config, layer, qkv_bias=biased, o_bias=biased, sinks=True)

    def make_mlp(self, layer: int) -> nn.Module:
        config = self.config
        size, experts = config.hidden_size, config.num_local_experts
        return SparseMoE(
            Router(size, Routing(experts, config.num_experts_per_tok), bias=True),
            FusedMoE(size, config.intermediate_size, experts, bias=True, limit=config.swiglu_limit),
        )
