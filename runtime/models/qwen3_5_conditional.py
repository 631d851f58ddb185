"""Qwen3.5 for images and text. Only text is served."""

from __future__ import annotations

from .checkpoint import VISION_LEFT_OUT
from .qwen3_5 import Qwen3_5ForCausalLM

ARCHITECTURE = "Qwen3_5ForConditionalGeneration"
MODEL_TYPE = "qwen3_5"


class Qwen3_5ForConditionalGeneration(Qwen3_5ForCausalLM):
    """Serves the text model. The vision tower is not loaded."""

    def remarks(self) -> dict[str, str]:
        return VISION_LEFT_OUT
