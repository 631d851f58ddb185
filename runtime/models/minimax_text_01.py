"""MiniMax-Text-01 (arXiv:2501.08313) under the name that MiniMax publishes it by."""

from __future__ import annotations

from .minimax import MiniMaxForCausalLM

ARCHITECTURE = "MiniMaxText01ForCausalLM"
MODEL_TYPE = "minimax_text_01"


class MiniMaxText01ForCausalLM(MiniMaxForCausalLM):
    """The base class already reads the members of these files."""
