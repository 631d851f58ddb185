"""What encoders have that decoders have not: norms with a mean, plain activations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from .linear import weight

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}


class LayerNorm(nn.Module):
    """Subtracts the mean of the last dimension of x [..., size], and normalises it."""

    def __init__(self, size: int, eps: float, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = weight(size)
        self.bias = weight(size) if bias else None
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
