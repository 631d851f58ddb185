"""What chooses tokens without filters, in plain torch: what it means, and what runs where no kernel
is faster. N rows of logits, V vocabulary size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

_BLOCK = 256


def softmax(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """softmax(logits / temperature), logits [N, V] and temperature [N] float32; all of a row is NaN
    where one of its logits is, or is infinite. `logits` may be overwritten.
    """
    return (logits / temperature[:, None]).softmax(dim=-1)


def sample_plain(
    logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor
) -> torch.Tensor:
    """Ids [N] int64 drawn from that softmax, -1 where it is NaN; uniform [N, 2] as `pick` takes
    it.
    """
    probs = softmax(logits, temperature)
    return torch.where(probs[:, 0].isfinite(), pick(probs, uniform), -1)


def pick(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Ids [N], each with the probability of its weight [N, V], and never one of weight 0; uniform
    [N, 2] float32: two numbers a row.

    The first chooses a block, the second a token in it: a running sum cannot be vectorised, and a
    plain one can. Sums of so few numbers are right to about 2^-24 in float32, and so is each
    token's share of its block, however small that is.
    """
    blocks = F.pad(weights, (0, -weights.shape[1] % _BLOCK)).view(weights.shape[0], -1, _BLOCK)
    block = _invert(blocks.sum(-1), uniform[:, :1])
    inside = _invert(
        blocks[torch.arange(len(block), device=block.device), block[:, 0]], uniform[:, 1:]
    )
    return (block * _BLOCK + inside)[:, 0]


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The first index [N, 1] of weights [N, n] whose running sum exceeds uniform [N, 1] times the
    whole sum; one that has a weight.
    """
    sums = weights.cumsum(-1)
    places = torch.arange(weights.shape[1], dtype=torch.float32, device=weights.device)
    exceeds = (sums > uniform * sums[:, -1:]) & (weights > 0)
    first = torch.where(exceeds, places, weights.shape[1]).amin(-1, keepdim=True)
    # Rounding may lift the target up to the whole sum, which none exceeds.
    last = torch.where(weights > 0, places, 0.0).amax(-1, keepdim=True)
    return torch.minimum(first, last).long()
