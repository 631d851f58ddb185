"""StarCoder2 (arXiv:2402.19173): Llama with LayerNorms, biases on all linear layers, a feed-forward
without a gate, and a sliding window.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ..config.model import ModelConfig, sliding_windows
from ..layers.activation import ACTIVATIONS
from ..layers.linear import StoredTensor
from ..layers.mlp import MLP
from ..layers.norm import LayerNorm
from ..layers.self_attention import SelfAttention
from .causal_lm import CausalLM
from .checkpoint import renamed

ARCHITECTURE = "Starcoder2ForCausalLM"
MODEL_TYPE = "starcoder2"
GGUF_ARCHITECTURE = "starcoder2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Starcoder2Config(ModelConfig):
    use_bias: bool = True


class Starcoder2ForCausalLM(CausalLM):
    """GGUF files do not hold the window."""

    config_class: ClassVar[type[ModelConfig]] = Starcoder2Config
    config_defaults: ClassVar = {
        **CausalLM.config_defaults,
        "num_key_value_heads": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "sliding_window": None,
    }
    config_names: ClassVar[dict[str, str]] = {"norm_epsilon": "rms_norm_eps"}

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        return {"windows": sliding_windows(config, config.sliding_window, 0)}

    @staticmethod
    def gguf_members(get: Callable[..., Any], tensors: Collection[str]) -> dict[str, Any]:
        return {"use_bias": "blk.0.attn_q.bias" in tensors}

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
        return renamed(tensors, {r"\.c_fc\.": ".up_proj.", r"\.c_proj\.": ".down_proj."})

    def make_norm(self) -> nn.Module:
        return LayerNorm(self.config.hidden_size, eps=self.config.norm_eps, bias=True)

    def make_attention(self, layer: int) -> nn.Module:
        biased = self.config.use_bias
        return SelfAttention(self.config, layer, qkv_bias=biased, o_bias=biased)

    def make_mlp(self, layer: int) -> nn.Module:
        config = self.config
        activation = ACTIVATIONS[config.activation]
        return MLP(config.hidden_size, config.intermediate_size, activation, bias=config.use_bias)
