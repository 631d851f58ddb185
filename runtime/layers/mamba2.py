"""The mixer of Mamba 2 (arXiv:2405.21060) as in hybrid models."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from ...kernels.state import StateLayout
from .linear import Linear, Stretch
from .norm import GatedRMSNorm
from .recurrent import CausalConv, float_weight
from .rotary import Rotations


class Mamba2Sizes(NamedTuple):
    """The sizes of a Mamba 2 mixer.

    Attributes:
        heads, head_dim: Heads, and channels of a head.
        groups: Groups of heads. The heads of a group share b and c.
        state: Numbers of the state of a channel.
        conv: Tokens that the convolution reads.
        dt_limits: Least and greatest step size (dt).
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    conv: int
    dt_limits: tuple[float, float] = (0.0, float("inf"))

    @property
    def inner(self) -> int:
        """Channels of all heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return self.inner + 2 * self.groups * self.state


class Mamba2Mixer(nn.Module):
    """Maps x [T, hidden] to [T, hidden]. `norm` normalises the gated result. If it is None, the
    result is only gated.
    """

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        sizes: Mamba2Sizes,
        norm: GatedRMSNorm | None,
        *,
        conv_bias: bool,
        in_bias: bool,
        out_bias: bool,
    ) -> None:
        super().__init__()
        self.layer, self.sizes, self.norm = layer, sizes, norm
        self.held_rows: Stretch | None = None
        rows = sizes.inner + sizes.channels + sizes.heads
        self.in_proj = Linear(hidden_size, rows, bias=in_bias)
        self.conv1d = CausalConv(sizes.channels, sizes.conv, bias=conv_bias)
        self.A_log, self.D = float_weight(sizes.heads), float_weight(sizes.heads)
        self.dt_bias = float_weight(sizes.heads)
        self.out_proj = Linear(sizes.inner, hidden_size, bias=out_bias)

    def hold_heads(self, heads: Stretch, groups: int) -> None:
        """Keep only these heads, which belong to `groups` groups, for a layer split over ranks."""
        self.held_rows = heads
        self.sizes = self.sizes._replace(heads=heads.size, groups=groups)
        self.A_log, self.D, self.dt_bias = (float_weight(heads.size) for _ in range(3))

    def state_layout(self, dtype: torch.dtype) -> StateLayout:
        """Return the shapes of the state of a request: inputs of the convolution, and the state of
        each head.
        """
        sizes = self.sizes
        return StateLayout(
            (
                ((sizes.conv - 1, sizes.channels), dtype),
                ((sizes.heads, sizes.head_dim, sizes.state), torch.float32),
            )
        )

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """Return the gate, the input of the convolution, and dt, side by side."""
        projected: torch.Tensor = self.in_proj(x)
        return projected

    def forward(self, x: torch.Tensor, rotations: Rotations) -> torch.Tensor:
        sizes = self.sizes
        gate, x, dt = self.project(x).tensor_split([sizes.inner, -sizes.heads], dim=-1)
        out = x.new_empty(len(x), sizes.inner)
        conv = self.conv1d
        torch.ops.piecework.mamba2(
            x,
            dt,
            conv.weight,
            conv.bias,
            self.A_log,
            self.D,
            self.dt_bias,
            out,
            *sizes.dt_limits,
            self.layer,
        )
        gated = out * F.silu(gate) if self.norm is None else self.norm(out, gate)
        output: torch.Tensor = self.out_proj(gated)
        return output
