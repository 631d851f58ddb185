"""Feed-forward layers with and without a gate."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from ...kernels.step_parts import FeedForwardParts
from .activation import ACTIVATIONS, GATED
from .linear import FusedLinear, Linear


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)) of x [T, hidden]."""

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
        """The projection from hidden to intermediate columns."""
        return self.gate_up_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down_proj(self.activation(self.gate_up_proj(x)))
        return down

    def step_parts(self) -> FeedForwardParts:
        return FeedForwardParts(self.gate_up_proj, self.down_proj, self.activation_name)


def sum_columns(x: torch.Tensor) -> torch.Tensor:
    """Return the sum [..., 1] of the columns of x [..., columns]."""
    return x.sum(-1, keepdim=True)


class GaussianTopKMLP(GatedMLP):
    """`GatedMLP` that keeps about the largest gates of each row and sets the others to 0 (Gemma
    3n).

    The gates are assumed to be normally distributed: the threshold lies `deviations` standard
    deviations above their mean. `sum_columns` sums over the columns of all ranks.
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, deviations: float, *, activation: str
    ) -> None:
        super().__init__(hidden_size, intermediate_size, activation=activation)
        # Rounded to the dtype of the weights, which is torch's default while models are made.
        self.deviations = torch.tensor(deviations, device="cpu").item()
        self.columns = intermediate_size
        self.gate_activation = ACTIVATIONS[activation]
        self.sum_columns: Callable[[torch.Tensor], torch.Tensor] = sum_columns

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        wide = gate.float()
        sums = self.sum_columns(torch.stack((wide, wide.square())))
        mean, mean_square = (sums / self.columns).unbind()
        deviation = (mean_square - mean.square()).clamp_min(0.0).sqrt()
        threshold = mean.to(x.dtype) + deviation.to(x.dtype) * self.deviations
        down: torch.Tensor = self.down_proj(self.gate_activation(F.relu(gate - threshold)) * up)
        return down


class MLP(nn.Module):
    """down(activation(up(x))) of x [T, hidden]."""

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
        """The projection from hidden to intermediate columns."""
        return self.up_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down_proj(self.activation(self.up_proj(x)))
        return down
