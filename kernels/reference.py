"""Every op in plain torch: what it means, and what runs where no kernel is faster.

T tokens, H hidden size, D head size, N rows of logits, V vocabulary size. Few torch calls each, for
on a CPU a call costs as much as the arithmetic of a token. Each op of a model rounds to the
tensors' dtype where transformers' models do, so that in bf16 too the logits are the same bits.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

_CANDIDATES = 1024
"""Tokens that sampling looks at first; where they do not hold all that a row keeps, it sorts the
rows whole.
"""
UNIT = 2.0**52
"""Probabilities are summed as whole multiples of 1 / UNIT: exactly in float64, and in any order."""
UNIFORM_DTYPE = np.float64
"""Of the numbers that `sample_filtered` draws by; a version that takes float32 says so under the
same name.
"""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32 up to the product
    (arXiv:1910.07467).
    """
    return F.rms_norm(x, weight.shape, None, eps) * weight


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual [T, H]: (rms_norm(x + residual), x + residual)."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x [T, 2 * I], the gate before the up projection: silu(gate) * up, [T, I]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotary_embedding(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [T, heads, D] by its position: dimension i is paired with i + D / 2 (Su et al.,
    arXiv:2104.09864).

    cos, signed_sin [T, 1, D]: both halves are alike but for the sign of the sine, negative in the
    first: half of x needs no negation when it is rolled to the place of its partner.
    """
    return x * cos + x.roll(x.shape[-1] // 2, -1) * signed_sin


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Ids [N] int64 of the largest of each row of logits [N, V] float32; of equals the lowest."""
    return logits.argmax(dim=-1)


def sample_filtered(
    probs: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    """Token ids [N] int64, drawn from what top-k, top-p (of what top-k leaves) and min-p all keep
    of probs [N, V] float32.

    top_k [N] int64, V where it is off; top_p, min_p [N] float32; uniform [N] float64 in [0, 1).
    Each keeps at least the likeliest token. Tokens stand in the order of their probability, of
    equals the lower id first; drawn is the first whose running sum exceeds uniform times the sum of
    all that are kept. Sums are exact (`UNIT`), so whoever computes them draws the same token.
    """
    vocab = probs.shape[1]
    width = min(vocab, _CANDIDATES)
    if width < vocab:
        tokens, complete = _draw(*_likeliest(probs, width), vocab, top_k, top_p, min_p, uniform)
        if bool(complete.all()):
            return tokens
    values, ids = probs.sort(dim=-1, descending=True, stable=True)
    return _draw(values, ids, vocab, top_k, top_p, min_p, uniform)[0]


def _likeliest(probs: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `width` largest of each row and their ids, as a stable sort orders them: `topk` orders
    equals as it likes.
    """
    ids = probs.topk(width, dim=-1).indices.sort(dim=-1).values
    values, order = probs.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _draw(
    values: torch.Tensor,
    ids: torch.Tensor,
    vocab: int,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [N] from the candidates `values`, `ids` [N, n] in their order, and whether a row keeps
    nothing beside them [N].
    """
    top_k, width = top_k[:, None], values.shape[1]
    weights = (values * UNIT).long()
    sums = weights.cumsum(-1)
    among_k = torch.arange(width, device=values.device) < top_k
    mass = torch.where(top_k < vocab, (weights * among_k).sum(-1, keepdim=True), int(UNIT))
    among_p = (sums - weights < (top_p.double()[:, None] * mass).clamp_(min=1.0)) | (
        top_p[:, None] >= 1.0
    )
    keep = among_k & among_p & (values >= min_p[:, None] * values[:, :1])
    kept = (weights * keep).sum(-1, keepdim=True)
    target = torch.minimum((uniform[:, None] * kept).long(), kept - 1)
    place = torch.searchsorted(sums, target, right=True).clamp_(max=width - 1)
    # Equals of the last candidate may stand beyond it, with lower ids. Of NaN nothing is kept.
    last = values.gather(1, (keep.sum(-1, keepdim=True) - 1).clamp_(min=0))
    complete = ((last > values[:, -1:]) & ((top_k <= width) | (top_k >= vocab))) | (
        weights[:, -1:] == 0
    )
    return ids.gather(1, place)[:, 0], complete[:, 0]
