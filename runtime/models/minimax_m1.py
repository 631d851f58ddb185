"""MiniMax-M1 (arXiv:2506.13585) as MiniMax publishes it: MiniMax-Text-01 under another name."""

from __future__ import annotations

from .minimax import MiniMaxForCausalLM

ARCHITECTURE = "MiniMaxM1ForCausalLM"
MODEL_TYPE = "minimax_m1"


class MiniMaxM1ForCausalLM(MiniMaxForCausalLM):
    """The base class already reads the members of these files."""
