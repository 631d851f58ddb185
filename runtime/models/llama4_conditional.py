"""Llama 4 for images and text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..layers.linear import StoredTensor
from .checkpoint import TEXT_ALONE, renamed
from .llama4 import Llama4ForCausalLM

ARCHITECTURE = "Llama4ForConditionalGeneration"
MODEL_TYPE = "llama4"


class Llama4ForConditionalGeneration(Llama4ForCausalLM):
    """The text model. `runtime/multimodal/llama4.py` encodes the images."""

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        return Llama4ForCausalLM.checkpoint_tensors(config, renamed(tensors, TEXT_ALONE))
