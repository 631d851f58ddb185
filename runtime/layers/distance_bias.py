"""Biases of scores that depend on the distance between two tokens.

Shapes: H heads, L tokens of a sequence, B queries of a block.
"""

from __future__ import annotations

import math

import torch


def distances(length: int, device: torch.device) -> torch.Tensor:
    """Return the distances from a query to a key: [2 L - 1] int64, from -(L - 1) to L - 1."""
    return torch.arange(1 - length, length, device=device)


def spread(values: torch.Tensor, begin: int, queries: int) -> torch.Tensor:
    """Return the biases [1, H, B, L] of `queries` queries from position `begin` on.

    values [H, 2 L - 1] holds a bias for each of `distances`.
    """
    length = (values.shape[1] + 1) // 2
    # The values of the query at position i begin at L - 1 - i.
    rows = values.unfold(1, length, 1)[:, length - begin - queries : length - begin]
    return rows.flip(1)[None]


def bucket_numbers(places: torch.Tensor, buckets: int, farthest: int) -> torch.Tensor:
    """Return T5's bucket (arXiv:1910.10683) of each distance.

    Each direction has half of the buckets. Half of these hold one distance each. The size of the
    others grows with the logarithm of the distance up to `farthest`.
    """
    half = buckets // 2
    exact = half // 2
    far = places.abs()
    grown = torch.log(far.float() / exact) / math.log(farthest / exact) * (half - exact)
    grown = torch.where(far < exact, 0, grown).long() + exact
    return half * (places > 0) + torch.where(far < exact, far, grown.clamp(max=half - 1))


def alibi_slopes(heads: int) -> torch.Tensor:
    """Return by how much the score falls per token of distance (arXiv:2108.12409): [H] float32."""
    whole = 2 ** int(math.log2(heads))
    powers = [(i + 1) / whole for i in range(whole)]
    # Heads beyond a power of two get slopes between those of the first heads.
    powers += [(2 * i + 1) / (2 * whole) for i in range(heads - whole)]
    return 2.0 ** (-8 * torch.tensor(powers, dtype=torch.float32, device="cpu"))
