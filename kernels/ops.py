"""The ops that layers call, each bound to this machine's version."""

from __future__ import annotations

from .reference import add_rms_norm, rms_norm, rotary_embedding, silu_and_mul

__all__ = ["add_rms_norm", "rms_norm", "rotary_embedding", "silu_and_mul"]
