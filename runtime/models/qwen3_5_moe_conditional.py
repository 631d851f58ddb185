"""Qwen3.5-MoE for images and text. Only text is served."""

from __future__ import annotations

from .checkpoint import VISION_LEFT_OUT
from .qwen3_5_moe import Qwen3_5MoeForCausalLM

ARCHITECTURE = "Qwen3_5MoeForConditionalGeneration"
MODEL_TYPE = "qwen3_5_moe"


class Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeForCausalLM):
    """Serves the text model. The vision tower is not loaded."""

    def remarks(self) -> dict[str, str]:
        return VISION_LEFT_OUT
