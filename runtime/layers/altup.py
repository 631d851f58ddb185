"""AltUp (arXiv:2301.13310) and LAuReL (arXiv:2411.07501), two parts of Gemma 3n's layers.

AltUp keeps several streams of hidden states. A layer computes one of them and corrects the others.
LAuReL adds a product of low rank to the hidden states.

Shapes: T tokens, n streams.
"""

from __future__ import annotations

import torch
from torch import nn

from .linear import Linear, rounded, weight
from .norm import RMSNorm


class _Coefficients(Linear):
    """A layer with a few rows or columns, whose weights are never packed or quantised."""

    is_read_as_numbers = True


class AltUp(nn.Module):
    """Predict all streams before a layer, and correct them after the layer has computed the stream
    with the number `active`.
    """

    def __init__(self, size: int, streams: int, active: int, eps: float) -> None:
        super().__init__()
        self.active, self.streams = active, streams
        self.correct_output_scale = weight(size)
        self.correction_coefs = _Coefficients(streams, streams)
        self.prediction_coefs = _Coefficients(streams, streams**2)
        self.modality_router = _Coefficients(size, streams)
        self.router_norm = RMSNorm(size, eps)
        self.router_scale = rounded(1.0 / size)

    def modalities(self, x: torch.Tensor) -> torch.Tensor:
        """Return the weight [T, n] of each stream for x [T, hidden]."""
        routed = self.modality_router(self.router_norm(x) * self.router_scale)
        modalities: torch.Tensor = torch.tanh(routed.float()).to(x.dtype)
        return modalities

    def predict(self, streams: torch.Tensor) -> torch.Tensor:
        """Return predictions [T, n, hidden] of streams [T, n, hidden]."""
        mixed = self.prediction_coefs(self.modalities(streams[:, self.active]))
        mixed = mixed.view(-1, self.streams, self.streams)
        predicted: torch.Tensor = torch.bmm(mixed, streams) + streams
        return predicted

    def correct(self, predicted: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        """Return corrected streams [T, n, hidden]. `made` [T, hidden] is the layer's result."""
        each = self.correction_coefs(self.modalities(made)) + 1.0
        corrected: torch.Tensor = (made - predicted[:, self.active])[:, None] * each[..., None]
        return corrected + predicted


class Laurel(nn.Module):
    """Add a product of low rank to x (LAuReL)."""

    def __init__(self, size: int, rank: int, eps: float) -> None:
        super().__init__()
        self.linear_left, self.linear_right = Linear(size, rank), Linear(rank, size)
        self.post_laurel_norm = RMSNorm(size, eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.post_laurel_norm(self.linear_right(self.linear_left(x)))
        return x + added
