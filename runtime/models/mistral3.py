"""Mistral Small 3.1 and later for images and text, of which the text is served."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from ..layers.linear import StoredTensor
from ..loader.checkpoint import TEXT_ALONE, VISION_LEFT_OUT, renamed
from .mistral import MistralForCausalLM

ARCHITECTURE = "Mistral3ForConditionalGeneration"
MODEL_TYPE = "mistral3"


class Mistral3ForConditionalGeneration(MistralForCausalLM):
    """Its vision tower is not loaded."""

    config_defaults: ClassVar = {**MistralForCausalLM.config_defaults, "sliding_window": None}

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        if (text := config.text_config.get("model_type")) not in ("mistral", None):
            raise ValueError(f"its text is a model of type {text!r}, which is not supported")
        return MistralForCausalLM.config_fields(config)

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
        return renamed(tensors, TEXT_ALONE)

    def remarks(self) -> dict[str, str]:
        return VISION_LEFT_OUT
