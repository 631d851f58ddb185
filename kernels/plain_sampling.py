"""Sampling without filters in plain torch: the reference, and the version used if no kernel is
faster.

N rows of logits, V vocabulary size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

_BLOCK = 256


def softmax(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Return softmax(logits / temperature) of logits [N, V] and temperature [N] float32.

    A row becomes NaN if one of its logits is NaN or infinite. `logits` may be overwritten.
    """
    return (logits / temperature[:, None]).softmax(dim=-1)


def sample_plain(
    logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor
) -> torch.Tensor:
    """Return ids [N] int64 drawn from that softmax, or -1 where it is NaN. uniform [N, 2]: see
    `pick`.
    """
    probs = softmax(logits, temperature)
    return torch.where(probs[:, 0].isfinite(), pick(probs, uniform), -1)


def pick(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draw ids [N] with probabilities in proportion to weights [N, V], never an id of weight 0.

    uniform [N, 2] float32 holds two random numbers per row. The first chooses a block, the second a
    token of the block: a plain sum can be vectorised, a running sum cannot. Sums of so few numbers
    are accurate to about 2^-24 in float32, and so is each token's share of its block.
    """
    blocks = F.pad(weights, (0, -weights.shape[1] % _BLOCK)).view(weights.shape[0], -1, _BLOCK)
    block = _invert(blocks.sum(-1), uniform[:, :1])
    inside = _invert(
        blocks[torch.arange(len(block), device=block.device), block[:, 0]], uniform[:, 1:]
    )
    return (block * _BLOCK + inside)[:, 0]


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return the first index [N, 1] with a weight at which the running sum of weights [N, n]
    exceeds uniform [N, 1] times the total.
    """
    sums = weights.cumsum(-1)
    places = torch.arange(weights.shape[1], dtype=torch.float32, device=weights.device)
    exceeds = (sums > uniform * sums[:, -1:]) & (weights > 0)
    first = torch.where(exceeds, places, weights.shape[1]).amin(-1, keepdim=True)
    # Rounding may raise the target to the total, which no running sum exceeds.
    last = torch.where(weights > 0, places, 0.0).amax(-1, keepdim=True)
    return torch.minimum(first, last).long()
