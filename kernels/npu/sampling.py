"""Filtered sampling for Ascend NPUs, in float32 and without waiting.

Ascend's units compute no float64 and few ops on 64-bit integers; those run on its control
processor. Sums are therefore float32, in two levels, accurate to a few 2^-24 of the total. With the
same uniform numbers, another token than the reference's is drawn in at most about one of 2^22 cases
per kept token.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

UNIFORM_DTYPE = np.float32
_BLOCK = 256
_LEAST = 2.0**-52


def sample_filtered(
    probs: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    """See `kernels.reference.sample_filtered`, except for the rounding of sums. uniform is [N]
    float32.

    Whole rows are sorted, because only the device knows how many candidates are enough.
    """
    vocab = probs.shape[1]
    values, ids = probs.sort(dim=-1, descending=True, stable=True)
    sums = _running_sums(values)
    ranks = torch.arange(vocab, dtype=torch.float32, device=probs.device)
    among_k = ranks < top_k[:, None].float()
    mass = torch.where(top_k[:, None] < vocab, _at_last(sums, among_k), 1.0)
    among_p = (sums - values < (top_p[:, None] * mass).clamp_(min=_LEAST)) | (top_p[:, None] >= 1.0)
    keep = among_k & among_p & (values >= min_p[:, None] * values[:, :1]) & (values > 0)
    below = keep & (sums <= uniform[:, None] * _at_last(sums, keep))
    # Rounding may raise the target to the sum of all kept tokens.
    place = torch.minimum(_count(below), (_count(keep) - 1).clamp_(min=0))
    return ids.gather(1, place.long())[:, 0]


def _running_sums(values: torch.Tensor) -> torch.Tensor:
    """Return running sums of values [N, V] float32: within blocks, plus the sums of earlier blocks.
    They never fall if no value is negative.
    """
    rows, vocab = values.shape
    inside = F.pad(values, (0, -vocab % _BLOCK)).view(rows, -1, _BLOCK).cumsum(-1)
    before = F.pad(inside[:, :, -1].cumsum(-1)[:, :-1], (1, 0))
    return (inside + before[:, :, None]).view(rows, -1)[:, :vocab]


def _count(chosen: torch.Tensor) -> torch.Tensor:
    """Return how many of each row are true [N, 1], exact in float32 up to 2^24."""
    return chosen.float().sum(-1, keepdim=True)


def _at_last(sums: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return the sum [N, 1] at the last chosen token. The chosen tokens are the first of
    each row.
    """
    return sums.gather(1, (_count(chosen) - 1).clamp_(min=0).long())
