"""The gated feed-forward layer."""

from __future__ import annotations

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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down_proj(self.activation(self.gate_up_proj(x)))
        return down

    def step_parts(self) -> FeedForwardParts:
        return FeedForwardParts(self.gate_up_proj, self.down_proj, self.activation_name)
