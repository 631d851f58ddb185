"""Sparse attention over latent vectors (DSA, DeepSeek V3.2, arXiv:2512.02556): an index scores the
tokens before a query, and the query sees those with the highest scores.

A request is long if it has more tokens than a query may see. Plain torch computes long requests
here, for every backend. The backend computes the other requests of the step.

Shapes: T tokens of the step, H heads, I heads of the index, D numbers of an index's head, n new
tokens of a request, s tokens of a request, K tokens that a query sees, P pages of S tokens. R and P
numbers of a vector: see `latent_attention`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from .attention import AttentionBackend, AttentionMetadata, KVLayout
from .latent_attention import (
    LatentLayer,
    LatentPlan,
    absorbed_queries,
    heads_values,
    keeper,
    load,
    load_plain,
    part_of_step,
    run_latent,
    store,
)

_NUMBERS = 2**24  # scores, or numbers of vectors, in memory at once


class Index(NamedTuple):
    """The tensors that a layer scores tokens with.

    Attributes:
        q: Queries of the step's tokens, [T, I, D].
        k: Keys of the step's tokens, [T, D].
        weights: A factor for each head's score, [T, I] float32.
        cache: Keys of all tokens, [P, S, D].
    """

    q: torch.Tensor
    k: torch.Tensor
    weights: torch.Tensor
    cache: torch.Tensor


class LongRequest(NamedTuple):
    """A long request. Its new tokens are the rows [start, stop) of the step.

    Attributes:
        pages: Its page numbers, in order.
        slots: Page * S + offset of each new token.
    """

    start: int
    stop: int
    seq_len: int
    pages: torch.Tensor
    slots: torch.Tensor

    def turns(self, numbers: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield slices of its rows, and the positions [rows, 1] of their tokens. A slice is as long
        as memory allows if each row takes `numbers` numbers.
        """
        each, first = max(1, _NUMBERS // numbers), self.seq_len - (self.stop - self.start)
        for begin in range(self.start, self.stop, each):
            end = min(begin + each, self.stop)
            places = torch.arange(begin, end, device=self.pages.device) - self.start + first
            yield slice(begin, end), places[:, None]


class SparsePlan(NamedTuple):
    """A step that has long requests.

    Attributes:
        long: The long requests.
        rows: The rows of all other requests; None if there are no others.
        metadata: The step with the other requests alone.
        plan: The backend's plan for `metadata`.
    """

    long: list[LongRequest]
    rows: torch.Tensor | None
    metadata: AttentionMetadata
    plan: Any


def plan_sparse(
    backend: AttentionBackend, metadata: AttentionMetadata, page_size: int, most: int
) -> SparsePlan | None:
    """Return the plan of a step, or None if no request has more than `most` tokens."""
    lengths, starts = metadata.seq_lens, [0, *accumulate(metadata.query_lens)]
    is_long = [length > most for length in lengths]
    if not any(is_long):
        return None
    long = [
        LongRequest(
            starts[request],
            starts[request + 1],
            lengths[request],
            metadata.block_table[request, : -(-lengths[request] // page_size)].long(),
            metadata.slot_mapping[starts[request] : starts[request + 1]].long(),
        )
        for request, each in enumerate(is_long)
        if each
    ]
    others = [request for request, each in enumerate(is_long) if not each]
    if not others:
        return SparsePlan(long, None, metadata, None)
    rows, rest = part_of_step(metadata, others)
    return SparsePlan(long, rows, rest, backend.plan(rest, page_size))


def store_index(index: Index, slots: torch.Tensor) -> None:
    """Store the keys of the step's tokens at their slots [T]."""
    index.cache.flatten(0, 1).index_copy_(0, slots.long(), index.k[: len(slots)])


def choose(index: Index, requests: Sequence[LongRequest], layout: KVLayout) -> list[torch.Tensor]:
    """Return the positions [n, K] that the new tokens of each request see.

    If fewer than K tokens come before a token, some of its positions lie after the token.
    """
    assert layout.selected is not None
    chosen = []
    for request in requests:
        keys = index.cache.index_select(0, request.pages).flatten(0, 1)[: request.seq_len].float()
        heads, length = index.q.shape[1], request.seq_len
        positions = torch.arange(length, device=keys.device)
        found = []
        for rows, own in request.turns(heads * length):
            scores = (index.q[rows].float() @ keys.T).relu()
            scores = torch.einsum("ni,nis->ns", index.weights[rows], scores)
            scores.masked_fill_(positions > own, float("-inf"))
            found.append(scores.topk(layout.selected, dim=-1).indices)
        chosen.append(torch.cat(found))
    return chosen


def run_sparse(
    backend: AttentionBackend,
    layer: LatentLayer,
    plan: SparsePlan,
    latent: LatentPlan | None,
    chosen: Sequence[torch.Tensor],
) -> None:
    """Store the vectors of the step, and write attention to the chosen positions into `layer.out`.

    `latent` says which requests of `plan.metadata` the backend computes expanded.
    """
    if plan.rows is not None:
        rows = plan.rows
        out = layer.out.new_empty(len(rows), *layer.out.shape[1:])
        part = layer._replace(q=layer.q[rows], k=layer.k[rows], out=out)
        run_latent(backend, part, plan.plan, latent)
        layer.out.index_copy_(0, rows, out)
    for request, positions in zip(plan.long, chosen, strict=True):
        _attend(backend, layer, request, positions)


def _attend(
    backend: AttentionBackend, layer: LatentLayer, request: LongRequest, chosen: torch.Tensor
) -> None:
    layout, page_size = layer.layout, layer.cache.shape[1]
    new = slice(request.start, request.stop)
    store(backend, layer, new, request.slots)
    if keeper(backend, layer) is not None:
        # Only the backend knows where a vector lies, and it reads whole pages.
        cache, places = load(backend, layer, request.pages).flatten(0, 1)[:, None], chosen
        kept = replace(layout, cache_dtype=None)
    else:
        cache, kept = layer.cache.flatten(0, 1)[:, None], layout
        places = request.pages[chosen // page_size] * page_size + chosen % page_size
    queries = absorbed_queries(layer._replace(q=layer.q[new]))
    attended = queries.new_empty(*queries.shape[:2], layout.value_size)
    for rows, positions in request.turns(chosen.shape[1] * layout.key_size):
        own = slice(rows.start - request.start, rows.stop - request.start)
        seen = load_plain(cache, places[own].flatten(), kept).view(*places[own].shape, -1)
        scores = (queries[own] @ seen.transpose(1, 2)).float() * layout.scale
        scores.masked_fill_((chosen[own] > positions)[:, None], float("-inf"))
        weights = scores.softmax(-1).to(seen.dtype)
        attended[own] = weights @ seen[..., : layout.value_size]
    layer.out[new] = heads_values(layer, attended)
