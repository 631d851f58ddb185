"""LLaVA-OneVision (arXiv:2408.03326): images and text, by a Qwen2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..layers.linear import StoredTensor
from .checkpoint import TEXT_ALONE, renamed
from .qwen2 import Qwen2ForCausalLM

ARCHITECTURE = "LlavaOnevisionForConditionalGeneration"
MODEL_TYPE = "llava_onevision"


class LlavaOnevisionForConditionalGeneration(Qwen2ForCausalLM):
    """The text model. `runtime/multimodal/llava_onevision.py` encodes the images."""

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        text = config.text_config
        if (kind := text.get("model_type", "qwen2")) != "qwen2":
            raise ValueError(f"its text is a model of type {kind!r}, which is not supported")
        # Published checkpoints say this of the text alone.
        is_tied = config.tie_word_embeddings or text.get("tie_word_embeddings", False)
        return {**Qwen2ForCausalLM.config_fields(config), "tie_word_embeddings": is_tied}

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
        return renamed(tensors, TEXT_ALONE)
