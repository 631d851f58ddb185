"""What requests change about their logits before a token is chosen. N rows, V vocabulary size.

Whatever changes is addressed in the flat logits [N * V], so that a batch takes no more operations
than one request.
"""

from __future__ import annotations

import numpy as np
import torch

from ...kernels.staging import to_device
from ..engine.request import Request


def adjust(
    logits: torch.Tensor, requests: list[Request], sampled: torch.Tensor | None = None
) -> None:
    """Apply penalties, logit bias and the ban on ending early to logits [N, V] float32, in place.

    `sampled` int64: what the step in flight samples, tokens that are pending among it.
    """
    if any(request.params.penalised for request in requests):
        _penalise(logits, requests, sampled)
    _bias(logits, requests)
    _ban_early_ends(logits, requests)


def _penalise(logits: torch.Tensor, requests: list[Request], sampled: torch.Tensor | None) -> None:
    """Repetition: over prompt and output, as in CTRL (arXiv:1909.05858); presence and frequency:
    over the output, as OpenAI's.
    """
    rows = [row for row, request in enumerate(requests) if request.params.penalised]
    index, counts, parameters = to_device(
        _tokens_of(requests, rows, logits.shape[1]), logits.device
    )
    pending = [row for row in rows if requests[row].num_placeholders]
    if pending:
        assert sampled is not None
        index, counts = _count_pending(
            index,
            counts,
            pending,
            [requests[row].sampled_row for row in pending],
            sampled,
            logits.shape,
        )
    repetition, presence, frequency = parameters.index_select(1, index // logits.shape[1])
    flat = logits.view(-1)
    values = flat.index_select(0, index)
    values = torch.where(values > 0, values / repetition, values * repetition)
    values = values - torch.where(counts > 0, presence + frequency * counts, 0.0)
    flat.index_copy_(0, index, values)


def _tokens_of(requests: list[Request], rows: list[int], vocab: int) -> list[np.ndarray]:
    """Of the tokens that penalties change: places in the flat logits [E], counts in the output [E];
    and every row's penalties [3, N].
    """
    parameters = np.array([[1.0], [0.0], [0.0]], np.float32).repeat(len(requests), 1)
    places, counts = [], []
    for row in rows:
        request = requests[row]
        params = request.params
        parameters[:, row] = (
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        ids, times = request.count_tokens()
        if params.repetition_penalty == 1.0:
            said = np.flatnonzero(times)
            ids, times = ids[said], times[said]
        places.append(ids + row * vocab)
        counts.append(times)
    return [np.concatenate(places), np.concatenate(counts), parameters]


def _count_pending(
    index: torch.Tensor,
    counts: torch.Tensor,
    pending: list[int],
    sampled_rows: list[int],
    sampled: torch.Tensor,
    shape: torch.Size,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Places and counts with one token more in each row of `pending`, which the host does not know:
    sampled[sampled_rows].

    A token that a row has had before is then there twice, with the same count.
    """
    rows, taken = to_device([np.array(pending), np.array(sampled_rows)], index.device)
    last = sampled.index_select(0, taken) + rows * shape[1]
    last_of_row = torch.full((shape[0],), -1, dtype=last.dtype, device=last.device).index_copy_(
        0, rows, last
    )
    row_of = index // shape[1]
    again = index == last_of_row.index_select(0, row_of)
    counts = counts + again
    before = torch.zeros(shape[0], device=counts.device).index_add_(
        0, row_of, torch.where(again, counts, 0.0)
    )
    once = before.index_select(0, rows).clamp_(min=1.0)
    return torch.cat((index, last)), torch.cat((counts, once))


def _bias(logits: torch.Tensor, requests: list[Request]) -> None:
    rows = [
        (row, request.params.logit_bias)
        for row, request in enumerate(requests)
        if request.params.logit_bias
    ]
    if rows:
        places = np.array([row * logits.shape[1] + token for row, bias in rows for token in bias])
        values = np.array([value for _, bias in rows for value in bias.values()], np.float32)
        logits.view(-1).index_add_(0, *to_device([places, values], logits.device))


def _ban_early_ends(logits: torch.Tensor, requests: list[Request]) -> None:
    early = [
        row
        for row, request in enumerate(requests)
        if request.num_output < request.params.min_new_tokens
    ]
    vocab = logits.shape[1]
    # A model's own may lie outside of its vocabulary, in the row of another request.
    places = [
        row * vocab + token
        for row in early
        for token in requests[row].stop_ids
        if 0 <= token < vocab
    ]
    if places:
        (index,) = to_device([np.array(places)], logits.device)
        logits.view(-1).index_fill_(0, index, float("-inf"))
