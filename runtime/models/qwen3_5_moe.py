"""Qwen3.5-MoE: Qwen3.5 with the mixtures of experts of Qwen3-Next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..config.model import ModelConfig
from .qwen3_5 import Qwen3_5Config, Qwen3_5ForCausalLM

ARCHITECTURE = "Qwen3_5MoeForCausalLM"
MODEL_TYPE = "qwen3_5_moe_text"
GGUF_ARCHITECTURE = "qwen35moe"


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3_5MoeConfig(Qwen3_5Config):
    num_experts: int = 256
    num_experts_per_tok: int = 8


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):
    """All layers have experts."""

    config_class: ClassVar[type[ModelConfig]] = Qwen3_5MoeConfig
    config_defaults: ClassVar = {
        **Qwen3_5ForCausalLM.config_defaults,
        "num_key_value_heads": 2,
        # There are no layers without experts.
        "intermediate_size": 512,
    }
