"""The mixer of Mamba (arXiv:2312.00752)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from ...kernels.state import StateLayout
from .linear import Linear, Stretch
from .recurrent import CausalConv, float_weight
from .rotary import Rotations


class MambaSizes(NamedTuple):
    """The sizes of a Mamba mixer.

    Attributes:
        inner: Channels.
        state: Numbers of the state of a channel.
        rank: Numbers of a token that the step sizes (dt) are computed from.
        conv: Tokens that the convolution reads.
    """

    inner: int
    state: int
    rank: int
    conv: int


class SelectiveMixer(nn.Module):
    """Maps x [T, hidden] to [T, hidden]. Subclasses compute dt, b and c from x (`select`)."""

    def __init__(
        self, layer: int, hidden_size: int, sizes: MambaSizes, *, conv_bias: bool, bias: bool
    ) -> None:
        super().__init__()
        self.layer, self.sizes = layer, sizes
        self.held_rows: Stretch | None = None
        self.in_proj = Linear(hidden_size, 2 * sizes.inner, bias=bias)
        self.conv1d = CausalConv(sizes.inner, sizes.conv, bias=conv_bias)
        self.A = float_weight(sizes.inner, sizes.state)
        self.D, self.dt_bias = float_weight(sizes.inner), float_weight(sizes.inner)
        self.out_proj = Linear(sizes.inner, hidden_size, bias=bias)

    def hold_channels(self, channels: Stretch) -> None:
        """Keep only the states of these channels, for a layer that is split over ranks."""
        self.held_rows = channels
        self.sizes = self.sizes._replace(inner=channels.size)
        self.A = float_weight(channels.size, self.sizes.state)
        self.D, self.dt_bias = float_weight(channels.size), float_weight(channels.size)

    def state_layout(self, dtype: torch.dtype) -> StateLayout:
        """Return the shapes of the state of a request: inputs of the convolution, and the state of
        each channel.
        """
        sizes = self.sizes
        return StateLayout(
            (
                ((sizes.conv - 1, sizes.inner), dtype),
                ((sizes.inner, sizes.state), torch.float32),
            )
        )

    def select(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (dt, b, c) for the output x [T, inner] of the convolution.

        dt [T, inner] does not include its bias. b and c are [T, G * state], shared by the channels
        of a group.
        """
        raise NotImplementedError

    def forward(self, x: torch.Tensor, rotations: Rotations) -> torch.Tensor:
        x, gate = self.in_proj(x).chunk(2, dim=-1)
        conv, convolved, out = self.conv1d, x.new_empty(x.shape), x.new_empty(x.shape)
        torch.ops.piecework.causal_conv(x, conv.weight, conv.bias, convolved, self.layer)
        x = F.silu(convolved)
        dt, b, c = self.select(x)
        weights = self.A, self.D, self.dt_bias
        torch.ops.piecework.selective_scan(x, dt, b, c, *weights, out, self.layer)
        output: torch.Tensor = self.out_proj(out * F.silu(gate))
        return output


class MambaMixer(SelectiveMixer):
    """A mixer in which all channels share b and c.

    `norm(size)` makes a norm for each of dt, b and c. If it is None, they have no norm.
    """

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        sizes: MambaSizes,
        *,
        conv_bias: bool,
        bias: bool,
        norm: Callable[[int], nn.Module] | None = None,
    ) -> None:
        super().__init__(layer, hidden_size, sizes, conv_bias=conv_bias, bias=bias)
        self.x_proj = Linear(sizes.inner, sizes.rank + 2 * sizes.state)
        self.dt_proj = Linear(sizes.rank, sizes.inner)
        norm = norm or (lambda size: nn.Identity())
        self.dt_layernorm = norm(sizes.rank)
        self.b_layernorm, self.c_layernorm = norm(sizes.state), norm(sizes.state)

    def select(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rank, state = self.sizes.rank, self.sizes.state
        dt, b, c = self.x_proj(x).split([rank, state, state], dim=-1)
        dt = self.dt_proj(self.dt_layernorm(dt))
        return dt, self.b_layernorm(b), self.c_layernorm(c)
