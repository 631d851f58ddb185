"""Norms, alone and with the residual stream carried through them.

Gemma's, whose weights are stored less 1, are RMSNorms once loaded: `loader.checkpoint.plus_one`.
"""

from __future__ import annotations

import torch
from torch import nn

from ...kernels import ops
from .linear import Stretch, weight


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


class AllHeadsRMSNorm(RMSNorm):
    """Normalises all heads of x [T, heads, D] together (OLMo 2)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.flatten(1)).view(x.shape)


class LayerNorm(nn.Module):
    """x [..., size] less its mean, normalised, without a bias (Cohere); x [..., heads, size] with a
    weight [heads, size].
    """

    def __init__(self, *shape: int, eps: float) -> None:
        super().__init__()
        self.weight = weight(*shape)
        self.eps = eps
        self.held_rows: Stretch | None = None

    def hold_rows(self, rows: Stretch) -> None:
        """From now on it has the weights of these heads."""
        self.held_rows = rows
        self.weight = weight(rows.size, self.weight.shape[-1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide - wide.mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight.float() * wide).to(x.dtype)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual)."""
        total = x + residual
        return self(total), total
