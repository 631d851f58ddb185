"""Norms, alone and combined with the addition to the residual stream.

Gemma stores its weights less 1. They become weights of RMSNorm when they are loaded
(`models.checkpoint.plus_one`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from ...kernels import ops
from ...kernels.step_parts import NormParts
from .linear import Stretch, weight


class RMSNorm(nn.Module):
    """Normalises the last dimension of x [..., size] by its root mean square."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = weight(size)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (norm(x + residual), x + residual)."""
        return ops.add_rms_norm(x, residual, self.weight, self.eps)

    def step_parts(self) -> NormParts:
        return NormParts(self.weight, self.eps)


class UnweightedRMSNorm(nn.Module):
    """RMSNorm without weights."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], None, self.eps)


class AllHeadsRMSNorm(RMSNorm):
    """Normalises all heads of x [T, heads, D] together (OLMo 2)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.flatten(1)).view(x.shape)

    def step_parts(self) -> NormParts:
        return NormParts(self.weight, self.eps, spans_heads=True)


class GatedRMSNorm(nn.Module):
    """Multiplies x [..., size] by `activation(gate)` and normalises each of `groups` parts, in
    float32.

    `norm_first`: x is normalised before it is multiplied.
    """

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        groups: int = 1,
        norm_first: bool = False,
        activation: Callable[[torch.Tensor], torch.Tensor] = F.silu,
    ) -> None:
        super().__init__()
        self.weight = weight(size)
        self.eps, self.groups, self.norm_first = eps, groups, norm_first
        self.activation = activation
        self.held_rows: Stretch | None = None

    def hold_rows(self, rows: Stretch, groups: int) -> None:
        """Keep only the weights of these groups, for a layer that is split over ranks."""
        self.held_rows, self.groups, self.weight = rows, groups, weight(rows.size)

    def mean_square(self, parts: torch.Tensor) -> torch.Tensor:
        """Return the mean squares [..., groups, 1] of parts [..., groups, size]."""
        return parts.square().mean(-1, keepdim=True)

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        wide, gate = x.float(), self.activation(gate.float())
        if not self.norm_first:
            wide = wide * gate
        parts = wide.view(*wide.shape[:-1], self.groups, -1)
        parts = parts * torch.rsqrt(self.mean_square(parts) + self.eps)
        wide = parts.flatten(-2) * self.weight
        return (wide * gate if self.norm_first else wide).to(x.dtype)


class LayerNorm(nn.Module):
    """Normalises x [..., size] by its mean and variance.

    With a weight [heads, size] it takes x [..., heads, size] (Cohere).
    """

    def __init__(self, *shape: int, eps: float, bias: bool = False) -> None:
        super().__init__()
        self.weight = weight(*shape)
        self.bias = weight(*shape) if bias else None
        self.eps = eps
        self.held_rows: Stretch | None = None

    def hold_rows(self, rows: Stretch) -> None:
        """Keep only the weights of these heads, for a layer that is split over ranks."""
        self.held_rows = rows
        self.weight = weight(rows.size, self.weight.shape[-1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight.dim() == 1:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        wide = F.layer_norm(x.float(), x.shape[-1:], eps=self.eps)
        return (self.weight.float() * wide).to(x.dtype)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (norm(x + residual), x + residual)."""
        total = x + residual
        return self(total), total
