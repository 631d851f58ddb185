"""Gemma 3 for images and text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..layers.linear import StoredTensor
from .checkpoint import TEXT_ALONE, renamed
from .gemma import add_one_to_norms
from .gemma3 import Gemma3ForCausalLM

ARCHITECTURE = "Gemma3ForConditionalGeneration"
MODEL_TYPE = "gemma3"


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """The text model. `runtime/multimodal/gemma3.py` encodes the images."""

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
        return add_one_to_norms(renamed(tensors, TEXT_ALONE))
