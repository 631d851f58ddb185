"""Gemma 4 for images and text. Audio is left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..layers.linear import StoredTensor
from .checkpoint import TEXT_ALONE_OF_GEMMA, renamed
from .gemma4 import Gemma4ForCausalLM

ARCHITECTURE = "Gemma4ForConditionalGeneration"
MODEL_TYPE = "gemma4"


class Gemma4ForConditionalGeneration(Gemma4ForCausalLM):
    """The text model. `runtime/multimodal/gemma4.py` encodes the images."""

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
        return Gemma4ForCausalLM.checkpoint_tensors(config, renamed(tensors, TEXT_ALONE_OF_GEMMA))
