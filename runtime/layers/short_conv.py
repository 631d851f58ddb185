"""The gated short convolution of LFM2."""

from __future__ import annotations

import torch
from torch import nn

from ...kernels.state import StateLayout
from .linear import Linear
from .recurrent import CausalConv
from .rotary import Rotations


class ShortConv(nn.Module):
    """out(c * conv(b * x)), where b, c and x are projections of the input [T, hidden].

    The convolution reads the last `width` tokens of each channel.
    """

    def __init__(self, layer: int, hidden_size: int, width: int, *, bias: bool) -> None:
        super().__init__()
        self.layer, self.channels, self.width = layer, hidden_size, width
        self.in_proj = Linear(hidden_size, 3 * hidden_size, bias=bias)
        self.conv = CausalConv(hidden_size, width, bias=bias)
        self.out_proj = Linear(hidden_size, hidden_size, bias=bias)

    def state_layout(self, dtype: torch.dtype) -> StateLayout:
        """Return the shape of the state of a request: the last inputs of the convolution."""
        return StateLayout((((self.width - 1, self.channels), dtype),))

    def forward(self, x: torch.Tensor, rotations: Rotations) -> torch.Tensor:
        b, c, x = self.in_proj(x).chunk(3, dim=-1)
        x = b * x
        out = torch.empty_like(x)
        torch.ops.piecework.causal_conv(x, self.conv.weight, self.conv.bias, out, self.layer)
        output: torch.Tensor = self.out_proj(c * out)
        return output
