"""Qwen3.5: Qwen3-Next with one projection for each of a Gated DeltaNet's inputs, and no experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..layers.gated_delta_net import DeltaSizes, GatedDeltaNet
from ..layers.linear import FusedLinear, Linear, StoredTensor
from ..loader.checkpoint import TEXT_ALONE, renamed
from ..model_config import ModelConfig
from .causal_lm import CausalLM
from .qwen3_next import ApartDeltaNet, Qwen3NextConfig, Qwen3NextForCausalLM

ARCHITECTURE = "Qwen3_5ForCausalLM"
MODEL_TYPE = "qwen3_5_text"


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
    """In texts its rotary positions of three kinds are one."""

    config_class: ClassVar[type[ModelConfig]] = Qwen3_5Config
    config_defaults: ClassVar = {
        **Qwen3NextForCausalLM.config_defaults,
        "vocab_size": 248320,
        "num_key_value_heads": 4,
    }

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
