"""Fuses the norm of each head of queries and keys with their rotation."""

from __future__ import annotations

from typing import Any

import torch

from ..pattern import Pattern

piecework = torch.ops.piecework


def norm_rotary(
    q: Any, k: Any, q_weight: Any, k_weight: Any, eps: Any, cos: Any, signed_sin: Any
) -> Any:
    normalised = (
        piecework.rms_norm.default(q, q_weight, eps),
        piecework.rms_norm.default(k, k_weight, eps),
    )
    heads = torch.cat(normalised, dim=1)
    return piecework.rotary_embedding.default(heads, cos, signed_sin)


PATTERNS = (Pattern(norm_rotary, piecework.norm_rotary_embedding.default),)
