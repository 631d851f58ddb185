"""StableLM (Stability AI): Llama with LayerNorms and rotation of a quarter of each head. Some
models have a norm of each head, or attention and feed-forward in parallel.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ..config.model import ModelConfig
from ..layers.decoder import ParallelLayer
from ..layers.linear import StoredTensor
from ..layers.norm import LayerNorm
from ..layers.self_attention import SelfAttention
from .causal_lm import CausalLM
from .checkpoint import stacked

ARCHITECTURE = "StableLmForCausalLM"
MODEL_TYPE = "stablelm"
GGUF_ARCHITECTURE = "stablelm"


@dataclass(frozen=True, slots=True, kw_only=True)
class StableLmConfig(ModelConfig):
    use_qkv_bias: bool = False
    qk_layernorm: bool = False
    use_parallel_residual: bool = False


class StableLmForCausalLM(CausalLM):
    config_class: ClassVar[type[ModelConfig]] = StableLmConfig
    config_defaults: ClassVar = {
        **CausalLM.config_defaults,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.25,
    }
    config_names: ClassVar[dict[str, str]] = {"layer_norm_eps": "rms_norm_eps"}
    takes_partial_rotary = True

    @staticmethod
    def gguf_members(get: Callable[..., Any], tensors: Collection[str]) -> dict[str, Any]:
        return {
            "use_qkv_bias": "blk.0.attn_q.bias" in tensors,
            "qk_layernorm": "blk.0.attn_q_norm.weight" in tensors,
            "use_parallel_residual": "blk.0.ffn_norm.weight" not in tensors,
        }

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
        return stacked(tensors, r"(.*\.[qk]_)layernorm\.norms\.(\d{1,6})\.weight", r"\1norm.weight")

    def make_norm(self) -> nn.Module:
        return LayerNorm(self.config.hidden_size, eps=self.config.norm_eps, bias=True)

    def make_layer(self, layer: int) -> nn.Module:
        if not self.config.use_parallel_residual:
            return super().make_layer(layer)
        return ParallelLayer(self.make_norm(), self.make_attention(layer), self.make_mlp(layer))

    def make_attention(self, layer: int) -> nn.Module:
        config = self.config
        q_norm, k_norm = (
            LayerNorm(heads, config.head_dim, eps=config.norm_eps) if config.qk_layernorm else None
            for heads in (config.num_heads, config.num_kv_heads)
        )
        biased = config.use_qkv_bias
        return SelfAttention(config, layer, qkv_bias=biased, q_norm=q_norm, k_norm=k_norm)
