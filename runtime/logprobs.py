"""Log-probabilities of given tokens and of the likeliest alternatives. N rows, V vocabulary size."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .messages import TokenLogprob


def token_logprobs(logits: torch.Tensor, tokens: Sequence[int], top_counts: Sequence[int]) -> list[TokenLogprob]:
    """One `TokenLogprob` a row of logits [N, V] float32: its token's log-probability and the `top_counts[row]` likeliest."""
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    widest = min(max(top_counts), logits.shape[1])
    if widest == 0:
        return [TokenLogprob(token_id=token, logprob=value) for token, value in zip(tokens, chosen, strict=True)]
    values, ids = (part.tolist() for part in logprobs.topk(widest, dim=-1))
    return [
        TokenLogprob(token_id=token, logprob=value, top=list(zip(ids[row][:top], values[row][:top], strict=True)))
        for row, (token, value, top) in enumerate(zip(tokens, chosen, top_counts, strict=True))
    ]
