"""Biases of scores that follow from the distance between two tokens.

H heads, L tokens of a sequence, B queries of a block.
"""

from __future__ import annotations

import math

import torch


def distances(length: int, device: torch.device) -> torch.Tensor:
    """From a query to each key that it may see: [2 L - 1] int64, from -(L - 1) to L - 1."""
    return torch.arange(1 - length, length, device=device)


def spread(values: torch.Tensor, begin: int, queries: int) -> torch.Tensor:
    """values [H, 2 L - 1], one for each of `distances`, to [1, H, B, L]: those of `queries` queries
    from position `begin` on.
    """
    length = (values.shape[1] + 1) // 2
    # The query at position i has the L values that begin at L - 1 - i.
    rows = values.unfold(1, length, 1)[:, length - begin - queries : length - begin]
    return rows.flip(1)[None]


def bucket_numbers(places: torch.Tensor, buckets: int, farthest: int) -> torch.Tensor:
    """T5's buckets (arXiv:1910.10683) of `distances`: half of them for each direction. Of these,
    half hold one distance each; the others grow with its logarithm up to `farthest`.
    """
    half = buckets // 2
    exact = half // 2
    far = places.abs()
    grown = torch.log(far.float() / exact) / math.log(farthest / exact) * (half - exact)
    grown = torch.where(far < exact, 0, grown).long() + exact
    return half * (places > 0) + torch.where(far < exact, far, grown.clamp(max=half - 1))


def alibi_slopes(heads: int) -> torch.Tensor:
    """What scores lose for each token between two others (arXiv:2108.12409), [H] float32."""
    whole = 2 ** int(math.log2(heads))
    powers = [(i + 1) / whole for i in range(whole)]
    # Heads beyond a power of two lie between the first ones.
    powers += [(2 * i + 1) / (2 * whole) for i in range(heads - whole)]
    return 2.0 ** (-8 * torch.tensor(powers, dtype=torch.float32, device="cpu"))
