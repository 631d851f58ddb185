"""LFM2 (Liquid AI): gated short convolutions, and attention in some layers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ..config.model import ModelConfig, check_size
from ..config.rope import number
from ..layers.decoder import DecoderLayer
from ..layers.linear import StoredTensor
from ..layers.norm import RMSNorm
from ..layers.self_attention import SelfAttention
from ..layers.short_conv import ShortConv
from .causal_lm import GGUF_BLOCK, CausalLM, gguf_names
from .checkpoint import from_llama_cpp, renamed
from .hybrid import check_columns, kinds_in_gguf, kinds_of_layers

ARCHITECTURE = "Lfm2ForCausalLM"
MODEL_TYPE = "lfm2"
GGUF_ARCHITECTURE = "lfm2"

# For `renamed`.
NAMES = {
    r"\.operator_norm\.": ".input_layernorm.",
    r"\.ffn_norm\.": ".post_attention_layernorm.",
    r"\.feed_forward\.(experts\.\d+\.)?w1\.": r".mlp.\1gate_proj.",
    r"\.feed_forward\.(experts\.\d+\.)?w2\.": r".mlp.\1down_proj.",
    r"\.feed_forward\.(experts\.\d+\.)?w3\.": r".mlp.\1up_proj.",
    r"\.feed_forward\.expert_bias$": ".mlp.gate.e_score_correction_bias",
    r"\.feed_forward\.": ".mlp.",
    r"\.self_attn\.(q|k)_layernorm\.": r".self_attn.\1_norm.",
    r"\.self_attn\.out_proj\.": ".self_attn.o_proj.",
    r"^model\.embedding_norm\.": "model.norm.",
}
GGUF = {
    **GGUF_BLOCK,
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lfm2Config(ModelConfig):
    layer_types: list[str] | None = None
    conv_bias: bool = False
    conv_L_cache: int = 3
    full_attn_idxs: list[int] | None = None
    block_multiple_of: int = 256
    block_ffn_dim_multiplier: float | None = 1.0
    block_auto_adjust_ff_dim: bool = True

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        check_columns("conv_L_cache", self.conv_L_cache)


class Lfm2ForCausalLM(CausalLM):
    config_class: ClassVar[type[ModelConfig]] = Lfm2Config
    config_defaults: ClassVar = {
        **CausalLM.config_defaults,
        "vocab_size": 65536,
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
    }

    gguf_names: ClassVar[dict[str, str]] = {**gguf_names(GGUF), "token_embd_norm": "model.norm"}
    gguf_keys: ClassVar[dict[str, str]] = {"shortconv.l_cache": "conv_L_cache"}

    @staticmethod
    def gguf_members(get: Callable[..., Any], tensors: Collection[str]) -> dict[str, Any]:
        return {
            **kinds_in_gguf(get, "conv"),
            "conv_bias": any(name.endswith("shortconv.in_proj.bias") for name in tensors),
            # `intermediate_size` in the file is already adjusted.
            "block_auto_adjust_ff_dim": False,
        }

    @staticmethod
    def gguf_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        return from_llama_cpp(tensors, "conv")

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        layers, attending = range(config.num_hidden_layers), config.full_attn_idxs
        default = [
            "full_attention" if layer in (layers if attending is None else attending) else "conv"
            for layer in layers
        ]
        check_size("intermediate_size", between := _between(config))
        return {
            **kinds_of_layers(config, ("conv", "full_attention"), default),
            "intermediate_size": between,
            "norm_eps": number("norm_eps", getattr(config, "norm_eps", config.rms_norm_eps)),
            "tie_word_embeddings": bool(
                getattr(config, "tie_embedding", config.tie_word_embeddings)
            ),
        }

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        return renamed(tensors, NAMES)

    def make_layer(self, layer: int) -> nn.Module:
        config, mlp = self.config, self.make_mlp(layer)
        if config.layer_types[layer] == "full_attention":
            return DecoderLayer(config, self.make_attention(layer), mlp)
        conv = ShortConv(layer, config.hidden_size, config.conv_L_cache, bias=config.conv_bias)
        return DecoderLayer(config, conv, mlp, "conv")

    def make_attention(self, layer: int) -> nn.Module:
        config = self.config
        return SelfAttention(
            config,
            layer,
            q_norm=RMSNorm(config.head_dim, config.norm_eps),
            k_norm=RMSNorm(config.head_dim, config.norm_eps),
        )


def _between(config: Any) -> int:
    """Return the intermediate columns that follow from a config.json."""
    size = number("block_ff_dim", getattr(config, "block_ff_dim", config.intermediate_size))
    if not config.block_auto_adjust_ff_dim:
        return int(size)
    size = int(2 * size / 3)
    if (factor := config.block_ffn_dim_multiplier) is None:
        return size
    if (unit := config.block_multiple_of) < 1:
        raise ValueError(f"block_multiple_of must be above 0, got {unit}; download the model again")
    return -(-int(factor * size) // int(unit)) * int(unit)
