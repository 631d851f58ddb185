"""Every op in plain torch: what it means, and what runs where no kernel is faster.

T tokens, H hidden size, D head size. Few torch calls each, for on a CPU a call costs as much as the arithmetic of a token.
Each rounds to the tensors' dtype where transformers' models do, so that in bf16 too the logits are the same bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32 up to the product (arXiv:1910.07467)."""
    return F.rms_norm(x, weight.shape, None, eps) * weight


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual [T, H]: (rms_norm(x + residual), x + residual)."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x [T, 2 * I], the gate before the up projection: silu(gate) * up, [T, I]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotary_embedding(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [T, heads, D] by its position: dimension i is paired with i + D / 2 (Su et al., arXiv:2104.09864).

    cos, signed_sin [T, 1, D]: both halves are alike but for the sign of the sine, negative in the first: half of x
    needs no negation when it is rolled to the place of its partner.
    """
    return x * cos + x.roll(x.shape[-1] // 2, -1) * signed_sin
