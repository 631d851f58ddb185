"""GLM 4 (0414): norms before and after attention and feed-forward as in Gemma 2, and rotation of
half of each head in pairs that lie side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ..config.model import ModelConfig
from ..layers.linear import StoredTensor
from ..layers.self_attention import SelfAttention
from .causal_lm import CausalLM, gguf_names
from .checkpoint import renamed
from .gemma2 import GGUF_SANDWICH, Gemma2Layer
from .phi3 import unfused_layers

ARCHITECTURE = "Glm4ForCausalLM"
MODEL_TYPE = "glm4"
GGUF_ARCHITECTURE = "glm4"


@dataclass(frozen=True, slots=True, kw_only=True)
class Glm4Config(ModelConfig):
    attention_bias: bool = True


# Names in checkpoints of the norms of `Gemma2Layer`.
_NORMS = {
    r"\.post_self_attn_layernorm\.": ".post_attention_layernorm.",
    r"\.post_attention_layernorm\.": ".pre_feedforward_layernorm.",
    r"\.post_mlp_layernorm\.": ".post_feedforward_layernorm.",
}


class Glm4ForCausalLM(CausalLM):
    config_class: ClassVar[type[ModelConfig]] = Glm4Config
    config_defaults: ClassVar = {
        **CausalLM.config_defaults,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1.5625e-7,
        "partial_rotary_factor": 0.5,
    }
    takes_partial_rotary = True
    gguf_names: ClassVar[dict[str, str]] = gguf_names(
        {**GGUF_SANDWICH, "ffn_up": "mlp.gate_up_proj"}
    )

    @staticmethod
    def gguf_members(get: Callable[..., Any], tensors: Collection[str]) -> dict[str, Any]:
        biases = "blk.0.attn_q.bias", "blk.0.attn_qkv.bias"
        return {"attention_bias": any(name in tensors for name in biases)}

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
        return renamed(unfused_layers(config, tensors), _NORMS)

    gguf_tensors = staticmethod(unfused_layers)

    def make_layer(self, layer: int) -> nn.Module:
        return Gemma2Layer(self.config, self.make_attention(layer), self.make_mlp(layer))

    def make_attention(self, layer: int) -> nn.Module:
        biased = self.config.attention_bias
        return SelfAttention(self.config, layer, qkv_bias=biased, interleaved=True)
