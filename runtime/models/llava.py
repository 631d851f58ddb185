"""LLaVA 1.5 (arXiv:2310.03744): images and text, by a Llama."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..layers.linear import StoredTensor
from .checkpoint import TEXT_ALONE, renamed
from .llama import LlamaForCausalLM

ARCHITECTURE = "LlavaForConditionalGeneration"
MODEL_TYPE = "llava"


class LlavaForConditionalGeneration(LlamaForCausalLM):
    """The text model. `runtime/multimodal/llava.py` encodes the images."""

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        if (text := config.text_config.get("model_type", "llama")) != "llama":
            raise ValueError(f"its text is a model of type {text!r}, which is not supported")
        return LlamaForCausalLM.config_fields(config)

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
        return renamed(tensors, TEXT_ALONE)
