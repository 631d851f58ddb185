"""Qwen2-VL (arXiv:2409.12191) for images and text, whose text model is that of Qwen2.5-VL."""

from __future__ import annotations

from .qwen2_5_vl import Qwen2_5_VLForConditionalGeneration

ARCHITECTURE = "Qwen2VLForConditionalGeneration"
MODEL_TYPE = "qwen2_vl"


class Qwen2VLForConditionalGeneration(Qwen2_5_VLForConditionalGeneration):
    """Its vision tower differs."""
