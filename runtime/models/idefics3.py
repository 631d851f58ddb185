"""Idefics 3 (arXiv:2408.12637) and SmolVLM (arXiv:2504.05299): images and text, by a Llama."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..layers.linear import StoredTensor
from .checkpoint import TEXT_ALONE, renamed
from .llama import LlamaForCausalLM

ARCHITECTURE = "Idefics3ForConditionalGeneration"
ALSO_ARCHITECTURE = "SmolVLMForConditionalGeneration"
MODEL_TYPE = "idefics3"
ALSO_MODEL_TYPE = "smolvlm"


class Idefics3ForConditionalGeneration(LlamaForCausalLM):
    """The text model. `runtime/multimodal/idefics3.py` encodes the images."""

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
        names = {r"^model\.connector\..*": "", r"^model\.text_model\.": "model.", **TEXT_ALONE}
        return renamed(tensors, names)
