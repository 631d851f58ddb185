"""Qwen3.5: Qwen3-Next without experts and with a separate projection for each input of the Gated
DeltaNet.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..config.model import ModelConfig
from ..layers.gated_delta_net import DeltaSizes, GatedDeltaNet
from ..layers.linear import FusedLinear, Linear, StoredTensor
from .causal_lm import CausalLM, gguf_names
from .checkpoint import TEXT_ALONE, renamed, reordered
from .qwen3_next import ApartDeltaNet, Qwen3NextConfig, Qwen3NextForCausalLM

ARCHITECTURE = "Qwen3_5ForCausalLM"
MODEL_TYPE = "qwen3_5_text"
GGUF_ARCHITECTURE = "qwen35"


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3_5Config(Qwen3NextConfig):
    num_experts: int = 0


class SplitDeltaNet(ApartDeltaNet):
    def __init__(self, layer: int, hidden_size: int, sizes: DeltaSizes, eps: float) -> None:
        super().__init__(layer, hidden_size, sizes, eps)
        heads = sizes.value_heads
        self.in_proj_ba = FusedLinear(hidden_size, {"in_proj_b": heads, "in_proj_a": heads})

    def sections(self) -> dict[Linear, dict[str, list[int]]]:
        heads = [self.sizes.value_heads]
        return {**super().sections(), self.in_proj_ba: {"in_proj_b": heads, "in_proj_a": heads}}

    def gates(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        b, a = self.in_proj_ba(x).chunk(2, dim=-1)
        return b, a


class Qwen3_5ForCausalLM(Qwen3NextForCausalLM):
    """For text the three kinds of rotary positions are equal."""

    # GGUF files have one name for this model with and without images.
    turns_images = True
    config_class: ClassVar[type[ModelConfig]] = Qwen3_5Config
    config_defaults: ClassVar = {
        **Qwen3NextForCausalLM.config_defaults,
        "vocab_size": 248320,
        "num_key_value_heads": 4,
    }

    gguf_names: ClassVar[dict[str, str]] = {
        **Qwen3NextForCausalLM.gguf_names,
        **gguf_names({"ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a"}),
    }

    @staticmethod
    def gguf_members(get: Callable[..., Any], tensors: Collection[str]) -> dict[str, Any]:
        """Return the number of layers without those that predict further tokens."""
        members = Qwen3NextForCausalLM.gguf_members(get, tensors)
        layers = get("block_count") - get("nextn_predict_layers", 0)
        return {**members, "qkvz_apart": False, "num_hidden_layers": layers}

    @staticmethod
    def gguf_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        found = Qwen3NextForCausalLM.gguf_tensors(
            config, [each for each in tensors if _layer(each.name) < config.num_layers]
        )
        return [_in_order(config.delta, tensor) for tensor in found]

    def delta_net(self) -> type[GatedDeltaNet]:
        return SplitDeltaNet

    @staticmethod
    def rope_parameters(content: dict[str, Any]) -> Any:
        rope = CausalLM.rope_parameters(content)
        if not isinstance(rope, dict):
            return rope
        return {name: value for name, value in rope.items() if not name.startswith("mrope_")}

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        return Qwen3NextForCausalLM.checkpoint_tensors(config, renamed(tensors, TEXT_ALONE))


def _layer(name: str) -> int:
    """Return the number of the layer of a tensor, or -1."""
    return int(next(filter(str.isdigit, name.split(".")), -1))


def _in_order(sizes: DeltaSizes, tensor: StoredTensor) -> StoredTensor:
    """Sort value heads so that those of one key head lie side by side.

    llama.cpp's converter puts the first value head of each key head before all second ones
    (`_LinearAttentionVReorderBase`).
    """
    _, _, own = tensor.name.partition(".linear_attn.")
    each = sizes.value_heads // sizes.key_heads
    heads = [r * sizes.key_heads + k for k in range(sizes.key_heads) for r in range(each)]
    kind = own.removesuffix(".weight")
    if kind in ("in_proj_qkv", "conv1d"):
        return reordered(tensor, 0, heads, sizes.value_dim, skipped=2 * sizes.keys)
    if kind == "in_proj_z":
        return reordered(tensor, 0, heads, sizes.value_dim)
    if kind in ("in_proj_a", "in_proj_b", "A_log", "dt_bias"):
        return reordered(tensor, 0, heads, 1)
    if kind == "out_proj":
        return reordered(tensor, 1, heads, sizes.value_dim)
    return tensor
