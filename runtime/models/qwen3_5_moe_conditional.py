"""Qwen3.5-MoE for images and text, with rotary positions of three kinds."""

from __future__ import annotations

from .qwen3_5_moe import Qwen3_5MoeForCausalLM

ARCHITECTURE = "Qwen3_5MoeForConditionalGeneration"
MODEL_TYPE = "qwen3_5_moe"


class Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeForCausalLM):
    """The text model. `runtime/multimodal/qwen_vl.py` encodes the images."""
