"""Mistral Small 3.1 and Ministral 3 for images and text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from ..layers.linear import StoredTensor
from .checkpoint import TEXT_ALONE, renamed
from .ministral3 import Ministral3ForCausalLM

ARCHITECTURE = "Mistral3ForConditionalGeneration"
MODEL_TYPE = "mistral3"


class Mistral3ForConditionalGeneration(Ministral3ForCausalLM):
    """The text model. `runtime/multimodal/mistral3.py` encodes the images."""

    config_defaults: ClassVar = {
        **Ministral3ForCausalLM.config_defaults,
        "max_position_embeddings": 131072,
    }

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        if (text := config.text_config.get("model_type")) not in ("mistral", "ministral3", None):
            raise ValueError(f"its text is a model of type {text!r}, which is not supported")
        return Ministral3ForCausalLM.config_fields(config)

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
        return renamed(tensors, TEXT_ALONE)
