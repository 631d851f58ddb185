"""Qwen2.5-VL (arXiv:2502.13923) for images and text: Qwen2 with rotary positions of three kinds,
which are equal for text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..layers.linear import StoredTensor
from .causal_lm import CausalLM
from .checkpoint import TEXT_ALONE, renamed
from .qwen2 import Qwen2ForCausalLM

ARCHITECTURE = "Qwen2_5_VLForConditionalGeneration"
MODEL_TYPE = "qwen2_5_vl"
GGUF_ARCHITECTURE = "qwen2vl"


class Qwen2_5_VLForConditionalGeneration(Qwen2ForCausalLM):
    """The text model. `runtime/multimodal/qwen_vl.py` encodes the images."""

    turns_images = True

    @staticmethod
    def rope_parameters(content: dict[str, Any]) -> Any:
        rope = CausalLM.rope_parameters(content)
        if not isinstance(rope, dict):
            return rope
        rope = {name: value for name, value in rope.items() if name != "mrope_section"}
        kinds = {"type", "rope_type"} & rope.keys()
        return rope | {name: "default" for name in kinds if rope[name] == "mrope"}

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
        return renamed(tensors, TEXT_ALONE)
