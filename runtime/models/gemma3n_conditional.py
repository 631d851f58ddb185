"""Gemma 3n for images, sound and text, of which the text is served."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..layers.linear import StoredTensor
from .checkpoint import TEXT_ALONE_OF_GEMMA, renamed
from .gemma3n import Gemma3nForCausalLM

ARCHITECTURE = "Gemma3nForConditionalGeneration"
MODEL_TYPE = "gemma3n"


class Gemma3nForConditionalGeneration(Gemma3nForCausalLM):
    """Its towers of vision and audio are not loaded."""

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
        return Gemma3nForCausalLM.checkpoint_tensors(config, renamed(tensors, TEXT_ALONE_OF_GEMMA))

    def remarks(self) -> dict[str, str]:
        return {"vision, audio": "left out: this server takes the model's text alone"}
