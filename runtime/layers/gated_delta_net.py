"""Gated DeltaNet (arXiv:2412.06464) as in Qwen3-Next, and its relatives."""

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
    """The sizes of a Gated DeltaNet.

    Attributes:
        key_heads: Heads of queries and keys.
        value_heads: Heads of values, a multiple of `key_heads`.
        key_dim, value_dim: Numbers of a head.
        conv: Tokens that the convolution reads.
        decays: Decays of a head: 1, or one for each number of its key.
        most_written: See `DeltaWeights`.
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
        """Numbers of the keys of a token. Its queries have as many."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Numbers of the values of a token. Their gates have as many."""
        return self.value_heads * self.value_dim


class GatedDeltaNet(nn.Module):
    """Maps x [T, hidden] to [T, hidden]. Subclasses define the projections (`project`)."""

    def __init__(self, layer: int, hidden_size: int, sizes: DeltaSizes, eps: float) -> None:
        super().__init__()
        self.layer, self.sizes = layer, sizes
        self.held_rows: Stretch | None = None
        self.conv1d = CausalConv(2 * sizes.keys + sizes.values, sizes.conv, bias=False)
        self._make_decays()
        self.norm = GatedRMSNorm(sizes.value_dim, eps, norm_first=True)
        self.out_proj = Linear(sizes.values, hidden_size)

    def hold_heads(self, key_heads: Stretch, value_heads: Stretch) -> None:
        """Keep only these heads, for a layer that is split over ranks."""
        sizes, self.held_rows = self.sizes, value_heads
        self.sizes = sizes._replace(key_heads=key_heads.size, value_heads=value_heads.size)
        self._make_decays()

    def _make_decays(self) -> None:
        heads, decays = self.sizes.value_heads, self.sizes.decays
        self.A_log = float_weight(heads)
        self.dt_bias = float_weight(heads) if decays == 1 else float_weight(heads, decays)

    def state_layout(self, dtype: torch.dtype) -> StateLayout:
        """Return the shapes of the state of a request: inputs of the convolution, and the state of
        each head.
        """
        sizes = self.sizes
        return StateLayout(
            (
                ((sizes.conv - 1, 2 * sizes.keys + sizes.values), dtype),
                ((sizes.value_heads, sizes.key_dim, sizes.value_dim), torch.float32),
            )
        )

    def sections(self) -> dict[Linear, dict[str, list[int]]]:
        """Return for each projection and each of its parts the sizes of its sections.

        Within a section the rows are ordered by heads.
        """
        raise NotImplementedError

    def project(
        self, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (queries, keys and values side by side; gates of the result [T, values]; write
        strength [T, value_heads]; decay inputs, `decays` for each head).
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
