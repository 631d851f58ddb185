"""Gated DeltaNet (arXiv:2412.06464) as Qwen3-Next has it, and its relatives."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from ...kernels.state import StateLayout
from .linear import Linear, Stretch
from .norm import GatedRMSNorm
from .recurrent import CausalConv, float_weight
from .rotary import Rotations


class DeltaSizes(NamedTuple):
    """Heads of queries and keys, and of values, which are a multiple of them; the numbers of each;
    tokens that the convolution sees. `decays`: numbers of a head's key that decay on their own, 1
    or all. `most_written`: as of `DeltaWeights`.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int
    decays: int = 1
    most_written: float = 1.0

    @property
    def keys(self) -> int:
        """Numbers of a token's keys, and of its queries."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Numbers of a token's values, and of their gates."""
        return self.value_heads * self.value_dim


class GatedDeltaNet(nn.Module):
    """x [T, hidden] to [T, hidden]. How it is projected is the model's: `project`."""

    def __init__(self, layer: int, hidden_size: int, sizes: DeltaSizes, eps: float) -> None:
        super().__init__()
        self.layer, self.sizes = layer, sizes
        self.held_rows: Stretch | None = None
        self.conv1d = CausalConv(2 * sizes.keys + sizes.values, sizes.conv, bias=False)
        self._make_decays()
        self.norm = GatedRMSNorm(sizes.value_dim, eps, norm_first=True)
        self.out_proj = Linear(sizes.values, hidden_size)

    def hold_heads(self, key_heads: Stretch, value_heads: Stretch) -> None:
        """From now on it has these heads."""
        sizes, self.held_rows = self.sizes, value_heads
        self.sizes = sizes._replace(key_heads=key_heads.size, value_heads=value_heads.size)
        self._make_decays()

    def _make_decays(self) -> None:
        heads, decays = self.sizes.value_heads, self.sizes.decays
        self.A_log = float_weight(heads)
        self.dt_bias = float_weight(heads) if decays == 1 else float_weight(heads, decays)

    def state_layout(self, dtype: torch.dtype) -> StateLayout:
        """What the layer keeps of a request: tokens for its convolution, and each head's state."""
        sizes = self.sizes
        return StateLayout(
            (
                ((sizes.conv - 1, 2 * sizes.keys + sizes.values), dtype),
                ((sizes.value_heads, sizes.key_dim, sizes.value_dim), torch.float32),
            )
        )

    def sections(self) -> dict[Linear, dict[str, list[int]]]:
        """Of each of its projections and their parts, the rows of the stretches in which heads lie
        in order.
        """
        raise NotImplementedError

    def project(
        self, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values side by side, gates of the result [T, values], a number a head
        [T, value_heads] for how much is written, and `decays` a head for how much is kept.
        """
        raise NotImplementedError

    def forward(self, x: torch.Tensor, rotations: Rotations) -> torch.Tensor:
        sizes = self.sizes
        qkv, gate, b, a = self.project(x)
        out = qkv.new_empty(len(qkv), sizes.values)
        torch.ops.piecework.gated_delta_net(
            qkv,
            b,
            a,
            self.conv1d.weight,
            self.A_log,
            self.dt_bias,
            out,
            sizes.most_written,
            self.layer,
        )
        heads = (-1, sizes.value_heads, sizes.value_dim)
        gated = self.norm(out.view(heads), gate.reshape(heads))
        output: torch.Tensor = self.out_proj(gated.flatten(1))
        return output
