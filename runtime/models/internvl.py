"""InternVL 3 (arXiv:2504.10479): images and text, by a Qwen2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..layers.linear import StoredTensor
from .checkpoint import TEXT_ALONE, renamed
from .qwen2 import Qwen2ForCausalLM

ARCHITECTURE = "InternVLForConditionalGeneration"
MODEL_TYPE = "internvl"


class InternVLForConditionalGeneration(Qwen2ForCausalLM):
    """The text model. `runtime/multimodal/internvl.py` encodes the images."""

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        if (text := config.text_config.get("model_type", "qwen2")) != "qwen2":
            raise ValueError(f"its text is a model of type {text!r}, which is not supported")
        return Qwen2ForCausalLM.config_fields(config)

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
        return renamed(tensors, TEXT_ALONE)
