"""Latent attention in which a query sees only the tokens that an index scores highest (DSA,
DeepSeek V3.2, arXiv:2512.02556).

Shapes: T tokens, I heads of the index, D numbers of an index's head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from ...kernels.attention import KVLayout
from .attention import sparse_latent_attention
from .latent_attention import LatentAttention
from .linear import Linear
from .norm import LayerNorm
from .rotary import Rotations, rotate

_NORM_EPS = 1e-6


class IndexSizes(NamedTuple):
    """I, D, and the number of tokens that a query sees."""

    heads: int
    width: int
    selected: int


class HeadWeights(Linear):
    """The layer that makes a factor for the score of each head."""

    stays_in_16_bits = True


class Indexer(nn.Module):
    """Make the tensors that tokens are scored with: queries [T, I, D], keys [T, D] and factors of
    heads [T, I] float32.

    `forward` takes x [T, hidden] and `low` [T, query rank], from which the layer also makes its
    queries. If `interleaved`, the pairs that are turned lie side by side.
    """

    def __init__(
        self, hidden_size: int, query: int, sizes: IndexSizes, *, interleaved: bool
    ) -> None:
        super().__init__()
        self.heads, self.interleaved = sizes.heads, interleaved
        self.scale = (sizes.heads * sizes.width) ** -0.5
        self.wq_b = Linear(query, sizes.heads * sizes.width)
        self.wk = Linear(hidden_size, sizes.width)
        self.k_norm = LayerNorm(sizes.width, eps=_NORM_EPS, bias=True)
        self.weights_proj = HeadWeights(hidden_size, sizes.heads)

    def forward(
        self, x: torch.Tensor, low: torch.Tensor, rotations: Rotations
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q = self.wq_b(low).unflatten(-1, (self.heads, -1))
        both = torch.cat((q, self.k_norm(self.wk(x))[:, None]), dim=1)
        turned = rotate(both, rotations[0], interleaved=self.interleaved)
        q, k = turned.tensor_split([self.heads], dim=1)
        return q, k[:, 0], self.weights_proj(x).float() * self.scale


class SparseLatentAttention(LatentAttention):
    """Latent attention to `selected` tokens. A layer without an indexer sees the tokens that the
    last layer with an indexer has chosen.
    """

    indexer: Indexer | None
    selected: int

    def kv_layout(self, dtype: torch.dtype) -> KVLayout:
        size = 0 if self.indexer is None else self.indexer.wk.out_features
        return replace(super().kv_layout(dtype), selected=self.selected, index_size=size)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        x: torch.Tensor,
        low: torch.Tensor,
        rotations: Rotations,
    ) -> torch.Tensor:
        index = None if self.indexer is None else self.indexer(x, low, rotations)
        return sparse_latent_attention(
            q, k, self.kv_b_proj.weight, self.sizes.value, self.layer, index
        )
