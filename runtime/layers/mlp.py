"""Feed-forward layers, with a gate and without."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ...kernels.step_parts import FeedForwardParts
from .activation import GATED
from .linear import FusedLinear, Linear


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)): x [T, hidden]."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        activation: str = "silu",
    ) -> None:
        super().__init__()
        self.gate_up_proj = FusedLinear(
            hidden_size, {"gate_proj": intermediate_size, "up_proj": intermediate_size}, bias=bias
        )
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias)
        self.activation_name, self.activation = activation, GATED[activation]

    @property
    def opening(self) -> FusedLinear:
        """What makes the columns between."""
        return self.gate_up_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down_proj(self.activation(self.gate_up_proj(x)))
        return down

    def step_parts(self) -> FeedForwardParts:
        return FeedForwardParts(self.gate_up_proj, self.down_proj, self.activation_name)


class MLP(nn.Module):
    """down(activation(up(x))): x [T, hidden]."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: Callable[[torch.Tensor], torch.Tensor],
        *,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.up_proj = FusedLinear(hidden_size, {"up_proj": intermediate_size}, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias)
        self.activation = activation

    @property
    def opening(self) -> FusedLinear:
        """As of `GatedMLP`."""
        return self.up_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down_proj(self.activation(self.up_proj(x)))
        return down
