"""Multi-head latent attention (DeepSeek V2, arXiv:2405.04434).

The cache holds one vector of R numbers for each token. The keys and values of all heads are
products of this vector. Behind it lie P numbers of a rotated key that all heads share.
`kernels.latent_attention` decides when the products are computed.

Shapes: T tokens, H heads, N numbers of a head's query that are not rotated, V numbers of a head's
value.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from ...kernels.attention import KVLayout
from ..config.model import ModelConfig
from .attention import latent_attention
from .linear import Linear
from .norm import RMSNorm
from .rotary import Rotations, rotate

_NORM_EPS = 1e-6  # Used by the norms inside this layer, in all models.


class LatentSizes(NamedTuple):
    """R, P, N, V, and the rank of the queries' projection, or None if it is a single matrix."""

    latent: int
    turned: int
    unturned: int
    value: int
    query: int | None


class _ReadLinear(Linear):
    is_read_as_numbers = True


class LatentAttention(nn.Module):
    """Multi-head latent attention of one layer.

    Attributes:
        scale: Factor of the scores.
        interleaved: Whether rotated pairs lie side by side.
        bias: Whether the projections from and to the hidden states have a bias.
        latent_scale: Factor of the normalised latent vectors, or None for no factor.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        sizes: LatentSizes,
        *,
        scale: float,
        interleaved: bool = True,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.layer, self.sizes, self.scale = layer, sizes, scale
        self.latent_scale: float | None = None
        self.num_heads, self.interleaved = config.num_heads, interleaved
        hidden, heads = config.hidden_size, config.num_heads
        query = heads * (sizes.unturned + sizes.turned)
        if sizes.query is None:
            self.q_proj = Linear(hidden, query)
        else:
            self.q_a_proj = Linear(hidden, sizes.query, bias=bias)
            self.q_a_layernorm = RMSNorm(sizes.query, _NORM_EPS)
            self.q_b_proj = Linear(sizes.query, query)
        self.kv_a_proj_with_mqa = Linear(hidden, sizes.latent + sizes.turned, bias=bias)
        self.kv_a_layernorm = RMSNorm(sizes.latent, _NORM_EPS)
        self.kv_b_proj = _ReadLinear(sizes.latent, heads * (sizes.unturned + sizes.value))
        self.o_proj = Linear(heads * sizes.value, hidden, bias=bias)

    @property
    def queries(self) -> Linear:
        """The projection that gives the queries of all heads."""
        return self.q_proj if self.sizes.query is None else self.q_b_proj

    def kv_layout(self, dtype: torch.dtype) -> KVLayout:
        """Return what the cache keeps of a token, and how it is read."""
        return KVLayout(
            num_heads=self.num_heads,
            num_kv_heads=1,
            key_size=self.sizes.latent + self.sizes.turned,
            value_size=self.sizes.latent,
            scale=self.scale,
            dtype=dtype,
            latent=True,
        )

    def turn(self, heads: torch.Tensor, rotations: Rotations) -> torch.Tensor:
        """Rotate the last P numbers of the queries and of the shared key, [T, H + 1, P]."""
        return rotate(heads, rotations[0], interleaved=self.interleaved)

    def forward(self, x: torch.Tensor, rotations: Rotations) -> torch.Tensor:
        sizes = self.sizes
        low = x if sizes.query is None else self.q_a_layernorm(self.q_a_proj(x))
        q = self.queries(low).unflatten(-1, (self.num_heads, -1))
        q, q_turned = q.tensor_split([sizes.unturned], dim=-1)
        latent, k_turned = self.kv_a_proj_with_mqa(x).tensor_split([sizes.latent], dim=-1)
        latent = self.kv_a_layernorm(latent)[:, None]
        if self.latent_scale is not None:
            latent = latent * self.latent_scale
        turned = self.turn(torch.cat((q_turned, k_turned[:, None]), dim=1), rotations)
        q_turned, k_turned = turned.tensor_split([self.num_heads], dim=1)
        q, k = torch.cat((q, q_turned), dim=-1), torch.cat((latent, k_turned), dim=-1)
        output: torch.Tensor = self.o_proj(self.attend(q, k, x, low, rotations))
        return output

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        x: torch.Tensor,
        low: torch.Tensor,
        rotations: Rotations,
    ) -> torch.Tensor:
        """Return the attention of all heads [T, H * V]. `low` is the input of the last projection
        of the queries.
        """
        return latent_attention(q, k, self.kv_b_proj.weight, self.sizes.value, self.layer)
