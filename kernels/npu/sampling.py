"""Filtered sampling for Ascend NPUs, in float32 and without a wait.

Ascend's units compute no float64 and few ops on 64-bit integers: those run on its control
processor. So sums are those of float32, made in two levels, right to a few 2^-24 of all that is
summed, and of equal uniform numbers now and then another token is drawn than by the reference's
exact sums: at most one of about 2^22 for each token that is kept.
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
    """As `kernels.reference.sample_filtered`, but for the rounding of sums; uniform [N] float32.

    Whole rows are sorted: how many candidates would do is known to the device alone.
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
    # Rounding may lift the target up to the sum of all that are kept.
    place = torch.minimum(_count(below), (_count(keep) - 1).clamp_(min=0))
    return ids.gather(1, place.long())[:, 0]


def _running_sums(values: torch.Tensor) -> torch.Tensor:
    """Of values [N, V] float32, never falling where they are not negative: within blocks, on top of
    the sums of the blocks before.
    """
    rows, vocab = values.shape
    inside = F.pad(values, (0, -vocab % _BLOCK)).view(rows, -1, _BLOCK).cumsum(-1)
    before = F.pad(inside[:, :, -1].cumsum(-1)[:, :-1], (1, 0))
    return (inside + before[:, :, None]).view(rows, -1)[:, :vocab]


def _count(chosen: torch.Tensor) -> torch.Tensor:
    """How many of each row are true [N, 1]: exact in float32 up to 2^24."""
    return chosen.float().sum(-1, keepdim=True)


def _at_last(sums: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """The sum [N, 1] at the last of those chosen, which are the first of each row."""
    return sums.gather(1, (_count(chosen) - 1).clamp_(min=0).long())
