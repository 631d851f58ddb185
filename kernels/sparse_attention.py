"""Sparse attention over latent vectors (DSA, DeepSeek V3.2, arXiv:2512.02556): an index scores the
tokens before a query, and the query sees those with the highest scores.

A request that is no longer than what its queries may see is an ordinary one, and the backend
computes it. The others are computed here in plain torch, whatever the backend is.

T tokens, H heads, I heads of the index, D numbers of one of them, n new tokens of a request, s of
all its tokens, K of which a query sees; P pages of S tokens.
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

_NUMBERS = 2**24
"""Scores, or numbers of vectors, that lie in memory at once; more queries wait for their turn."""


class Index(NamedTuple):
    """What a layer scores tokens by: q [T, I, D], k [T, D], `weights` of heads [T, I] float32, and
    the keys of all tokens, `cache` [P, S, D].
    """

    q: torch.Tensor
    k: torch.Tensor
    weights: torch.Tensor
    cache: torch.Tensor


class LongRequest(NamedTuple):
    """A request with more tokens than a query may see. Its rows of the step are [start, stop)."""

    start: int
    stop: int
    seq_len: int
    pages: torch.Tensor
    slots: torch.Tensor

    def turns(self, numbers: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """Rows of the step, as many at once as fit in memory, and their positions [rows, 1].
        `numbers`: that a row takes.
        """
        each, first = max(1, _NUMBERS // numbers), self.seq_len - (self.stop - self.start)
        for begin in range(self.start, self.stop, each):
            end = min(begin + each, self.stop)
            places = torch.arange(begin, end, device=self.pages.device) - self.start + first
            yield slice(begin, end), places[:, None]


class SparsePlan(NamedTuple):
    """What the layers of a step share. `rows`: of the requests that are ordinary ones, `plan`: what
    the backend has planned of them, `latent`: which of them it expands, once that is known. None:
    there are none.
    """

    long: list[LongRequest]
    rows: torch.Tensor | None
    metadata: AttentionMetadata
    plan: Any


def plan_sparse(
    backend: AttentionBackend, metadata: AttentionMetadata, page_size: int, most: int
) -> SparsePlan | None:
    """`most`: K. None: all requests are ordinary ones."""
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
    """The positions [n, K] that each new token of these requests sees. Where fewer than K tokens
    come before it, some lie behind it.
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
    """Store k, and write attention to the chosen positions into out. `latent`: as `run_latent`, of
    the requests that are ordinary ones.
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
        # Another order of vectors is read page by page.
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
