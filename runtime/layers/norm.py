"""RMSNorm, alone and with the residual stream carried through it."""

from __future__ import annotations

import torch
from torch import nn

from ...kernels import ops
from .linear import weight


class RMSNorm(nn.Module):
    """Normalises the last dimension of x [..., size]."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = weight(size)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual)."""
        return ops.add_rms_norm(x, residual, self.weight, self.eps)
