"""Qwen3.5 for images and text, with rotary positions of three kinds."""

from __future__ import annotations

from .qwen3_5 import Qwen3_5ForCausalLM

ARCHITECTURE = "Qwen3_5ForConditionalGeneration"
MODEL_TYPE = "qwen3_5"


class Qwen3_5ForConditionalGeneration(Qwen3_5ForCausalLM):
    """The text model. `runtime/multimodal/qwen_vl.py` encodes the images."""
