"""Several streams of hidden states of which each layer computes one (AltUp, arXiv:2301.13310), and
the residual of low rank beside it (LAuReL, arXiv:2411.07501), as Gemma 3n has them.

T tokens, n streams.
"""

from __future__ import annotations

import torch
from torch import nn

from .linear import Linear, weight
from .norm import RMSNorm


def rounded(value: float) -> float:
    """`value` in the dtype of the weights, which torch's default is while models are made."""
    return torch.tensor(value, device="cpu").item()


class _Coefficients(Linear):
    """Weights of a few rows or columns, which are kept as numbers."""

    is_read_as_numbers = True


class AltUp(nn.Module):
    """Predicts streams before a layer, and corrects them by what the layer made of the stream
    `active`. `size`: hidden numbers.
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
        """[T, n]."""
        routed = self.modality_router(self.router_norm(x) * self.router_scale)
        modalities: torch.Tensor = torch.tanh(routed.float()).to(x.dtype)
        return modalities

    def predict(self, streams: torch.Tensor) -> torch.Tensor:
        """Streams [T, n, hidden] to the same."""
        mixed = self.prediction_coefs(self.modalities(streams[:, self.active]))
        mixed = mixed.view(-1, self.streams, self.streams)
        predicted: torch.Tensor = torch.bmm(mixed, streams) + streams
        return predicted

    def correct(self, predicted: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        """`made` [T, hidden]: what the layer made of the predicted stream."""
        each = self.correction_coefs(self.modalities(made)) + 1.0
        corrected: torch.Tensor = (made - predicted[:, self.active])[:, None] * each[..., None]
        return corrected + predicted


class Laurel(nn.Module):
    """x plus a product of low rank (LAuReL)."""

    def __init__(self, size: int, rank: int, eps: float) -> None:
        super().__init__()
        self.linear_left, self.linear_right = Linear(size, rank), Linear(rank, size)
        self.post_laurel_norm = RMSNorm(size, eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.post_laurel_norm(self.linear_right(self.linear_left(x)))
        return x + added
