"""Pixtral: images of any size, row by row, in a LLaVA."""

from __future__ import annotations

from . import mistral3

ARCHITECTURES = ["LlavaForConditionalGeneration/pixtral"]


class Family(mistral3.Family):
    """The tower and the tokens of Mistral Small 3.1. Each patch is a position."""

    @property
    def merge(self) -> int:
        return 1
