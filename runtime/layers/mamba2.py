"""The mixer of Mamba 2 (arXiv:2405.21060) as hybrid models have it."""

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
    """`heads` of `head_dim` numbers, for each of which a state has `state` numbers; `groups` of
    heads share what is written and read; `conv`: tokens that the convolution sees. `dt_limits`:
    between which a step's length is held.
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    conv: int
    dt_limits: tuple[float, float] = (0.0, float("inf"))

    @property
    def inner(self) -> int:
        """Numbers of a token within the mixer."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return self.inner + 2 * self.groups * self.state


class Mamba2Mixer(nn.Module):
    """x [T, hidden] to [T, hidden]. `norm`: of the result, with its gate; None: the gate alone."""

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
        """From now on it has these heads, which read `groups` groups."""
        self.held_rows = heads
        self.sizes = self.sizes._replace(heads=heads.size, groups=groups)
        self.A_log, self.D, self.dt_bias = (float_weight(heads.size) for _ in range(3))

    def state_layout(self, dtype: torch.dtype) -> StateLayout:
        """What the layer keeps of a request: tokens for its convolution, and each head's state."""
        sizes = self.sizes
        return StateLayout(
            (
                ((sizes.conv - 1, sizes.channels), dtype),
                ((sizes.heads, sizes.head_dim, sizes.state), torch.float32),
            )
        )

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """The input's gate, what the convolution takes, and dt, side by side."""
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
