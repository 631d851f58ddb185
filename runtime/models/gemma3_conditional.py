"""Gemma 3 for images and text. Only text is served."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..layers.linear import StoredTensor
from .checkpoint import TEXT_ALONE, VISION_LEFT_OUT, renamed
from .gemma import add_one_to_norms
from .gemma3 import Gemma3ForCausalLM

ARCHITECTURE = "Gemma3ForConditionalGeneration"
MODEL_TYPE = "gemma3"


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """Serves the text model. The vision tower is not loaded."""

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
        return add_one_to_norms(renamed(tensors, TEXT_ALONE))

    def remarks(self) -> dict[str, str]:
        return VISION_LEFT_OUT
