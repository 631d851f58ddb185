"""AWQ (arXiv:2306.00978) as AutoAWQ writes it for its `gemm` kernels."""

from __future__ import annotations

import torch

from .weight_only import GroupedWeight, fields, packed_nibbles

BITS = 4
_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output that each of a word's eight numbers belongs to, from the lowest bits on (AutoAWQ,
awq/modules/linear/gemm.py).
"""


def unpack(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor) -> GroupedWeight:
    """qweight [K, N / 8] int32, qzeros [groups, N / 8] int32, scales [groups, N]."""
    numbers = packed_nibbles(_in_order(qweight).T.contiguous())
    return GroupedWeight(numbers, scales.T.contiguous(), _in_order(qzeros).T.contiguous())


def _in_order(words: torch.Tensor) -> torch.Tensor:
    """[rows, N / 8] words to [rows, N] numbers."""
    places = torch.tensor(_COLUMNS).argsort()
    return fields(words, BITS).view(len(words), -1, len(places))[..., places].flatten(1)
