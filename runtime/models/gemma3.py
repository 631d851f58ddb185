"""Gemma 3 (arXiv:2503.19786): Gemma 2 with normalised queries and keys instead of soft caps. Five
of six layers have a sliding window and rotary frequencies of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import nn

from ..config.model import ModelConfig, patterned_windows
from ..config.model_registry import UnsupportedError
from ..config.rope import number
from ..layers.norm import RMSNorm
from ..layers.rotary import Rotary
from ..layers.self_attention import SelfAttention
from .gemma2 import Gemma2Config, Gemma2ForCausalLM, query_scalar

ARCHITECTURE = "Gemma3ForCausalLM"
MODEL_TYPE = "gemma3_text"
GGUF_ARCHITECTURE = "gemma3"
GGUF_EMBEDDER = "gemma-embedding"
_OF_27B = 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Config(Gemma2Config):
    """The members of config.json.

    `rope_local_base_freq` is theta of layers with a window. `attn_logit_softcapping` has no effect,
    as in the code of transformers.
    """

    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    rope_local_base_freq: float = 10000.0


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    config_class: ClassVar[type[ModelConfig]] = Gemma3Config
    config_defaults: ClassVar = {
        **Gemma2ForCausalLM.config_defaults,
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
    }
    gguf_keys: ClassVar[dict[str, str]] = {
        **Gemma2ForCausalLM.gguf_keys,
        "rope.freq_base_swa": "rope_local_base_freq",
    }

    @staticmethod
    def rope_parameters(content: dict[str, Any]) -> Any:
        return rope_of_kind(content, "full_attention")

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        return {
            "windows": patterned_windows(config, config.sliding_window, 6),
            "rope_local_base_freq": local_theta(config, config.rope_local_base_freq),
        }

    @staticmethod
    def gguf_members(get: Callable[..., Any], tensors: Collection[str]) -> dict[str, Any]:
        return {"query_pre_attn_scalar": query_scalar(get, _OF_27B)}

    def make_rotaries(self) -> Sequence[nn.Module]:
        config = self.config
        theta = config.rope_local_base_freq
        local = replace(config, rope_theta=theta, rope_type="default", rope_scaling={})
        return [Rotary(config), Rotary(local)]

    def make_attention(self, layer: int) -> nn.Module:
        config = self.config
        return SelfAttention(
            config,
            layer,
            qkv_bias=config.attention_bias,
            o_bias=config.attention_bias,
            q_norm=RMSNorm(config.head_dim, config.norm_eps),
            k_norm=RMSNorm(config.head_dim, config.norm_eps),
            rotary=0 if config.windows[layer] is None else 1,
            scale=config.query_pre_attn_scalar**-0.5,
        )


def rope_of_kind(content: dict[str, Any], kind: str) -> Any:
    """Return the rope parameters for a kind of layer.

    Older config.json files have `rope_scaling`, for layers with full attention.
    """
    rope = content.get("rope_parameters") or {}
    if isinstance(rope, dict) and any(isinstance(value, dict) for value in rope.values()):
        rope = rope.get(kind)
        rope = rope if isinstance(rope, dict) else {}
    elif kind != "full_attention":
        rope = {}
    scaling = content.get("rope_scaling") if kind == "full_attention" else None
    return {**rope, **scaling} if isinstance(scaling, dict) else rope


def local_theta(config: Any, default: float | None) -> float | None:
    """Return theta of layers with a window. Raises `ValueError` if their frequencies are scaled."""
    rope = rope_of_kind(vars(config), "sliding_attention")
    kind = rope.get("rope_type", "default") if isinstance(rope, dict) else rope
    if kind != "default":
        raise UnsupportedError(
            f"rope scaling {kind!r:.60} of layers with a window is not supported; choose another "
            "model"
        )
    theta = rope.get("rope_theta", default)
    return None if theta is None else number("rope_theta", theta)
