"""Log-probabilities of tokens and of the likeliest alternatives. N rows, V vocabulary size, K
alternatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ..core.generation import TokenLogprob


def gather_logprobs(logits: torch.Tensor, tokens: torch.Tensor, widest: int) -> list[torch.Tensor]:
    """Return tensors for `read_logprobs`, on the device of the logits [N, V] float32.

    These are the log-probabilities of the tokens [N] int64, and, unless `widest` is 0, those of the
    K = min(widest, V) likeliest tokens [N, K] and their ids.
    """
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]
    return [chosen, *logprobs.topk(min(widest, logits.shape[1]), dim=-1)] if widest else [chosen]


def read_logprobs(
    gathered: Sequence[torch.Tensor], tokens: Sequence[int], top_counts: Sequence[int]
) -> list[TokenLogprob]:
    """Return one `TokenLogprob` per row, with the `top_counts[row]` likeliest tokens.

    `gathered` must be on the host.
    """
    chosen = gathered[0].tolist()
    if len(gathered) == 1:
        return [
            TokenLogprob(token_id=token, logprob=value)
            for token, value in zip(tokens, chosen, strict=True)
        ]
    values, ids = (part.tolist() for part in gathered[1:])
    return [
        TokenLogprob(
            token_id=token,
            logprob=value,
            top=list(zip(ids[row][:top], values[row][:top], strict=True)),
        )
        for row, (token, value, top) in enumerate(zip(tokens, chosen, top_counts, strict=True))
    ]


def gather_ranks(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return for each token [N] int64 how many logits of [N, V] are at least as large: [N]."""
    return (logits >= logits.gather(1, tokens[:, None])).sum(dim=1)


def with_ranks(entries: Sequence[TokenLogprob], ranks: torch.Tensor) -> list[TokenLogprob]:
    """Return the entries with ranks [N], which must be on the host."""
    return [replace(entry, rank=rank) for entry, rank in zip(entries, ranks.tolist(), strict=True)]
