"""LLaVA 1.6 (LLaVA-NeXT): images and text, by a Llama or a Mistral."""

from __future__ import annotations

from .llava import LlavaForConditionalGeneration

ARCHITECTURE = "LlavaNextForConditionalGeneration"
MODEL_TYPE = "llava_next"


class LlavaNextForConditionalGeneration(LlavaForConditionalGeneration):
    """The text model. `runtime/multimodal/llava_next.py` encodes the images."""
