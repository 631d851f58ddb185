"""Attention in chunks (Llama 4): a query sees the tokens of its own chunk up to itself. Chunks
begin at multiples of their size.

A request that has new tokens in several chunks is planned as several requests of one chunk each.
Any backend can compute these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from .attention import AttentionBackend, AttentionMetadata, GraphAttention, HostPlan, KVLayout
from .paged_attention import TorchAttention
from .staging import to_device


def with_chunks(backend: AttentionBackend, layouts: Sequence[KVLayout]) -> AttentionBackend:
    """Return `backend`, or a wrapper that computes chunks with it if layers have chunks. Raise
    `ValueError` if chunks have several sizes.
    """
    sizes = {layout.window for layout in layouts if layout.chunked}
    if len(sizes) > 1:
        raise ValueError("chunks of attention of several sizes are not supported")
    for size in sizes:
        assert size is not None
        graphs = isinstance(backend, GraphAttention)
        return (ChunkedGraphAttention if graphs else ChunkedAttention)(backend, size)
    return backend


@dataclass(slots=True)
class ChunkedPlan:
    """The plans of a step: `whole` for layers without chunks, `local` for chunks, made by
    `local_backend`.
    """

    whole: Any
    local: Any
    local_backend: AttentionBackend


class _HostChunkedPlan(ChunkedPlan):
    """A chunked plan with values outside of tensors (`HostPlan`)."""

    def host_arguments(self, batch_size: int) -> Mapping[str, Any]:
        arguments: Mapping[str, Any] = self.whole.host_arguments(batch_size)
        return arguments


class ChunkedAttention:
    """Computes chunks of `size` tokens, a multiple of the page size, with another backend."""

    def __init__(self, backend: Any, size: int) -> None:
        self.backend, self.size = backend, size

    def plan(self, metadata: AttentionMetadata, page_size: int) -> ChunkedPlan:
        whole = self.backend.plan(metadata, page_size)
        chunks = chunks_of(metadata, page_size, self.size)
        local = whole if chunks is metadata else self.backend.plan(chunks, page_size)
        return ChunkedPlan(whole, local, self.backend)

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: ChunkedPlan,
        layout: KVLayout,
    ) -> None:
        if layout.chunked:
            backend, planned = plan.local_backend, plan.local
        else:
            backend, planned = self.backend, plan.whole
        backend.run(q, k, v, out, k_cache, v_cache, planned, layout)


class ChunkedGraphAttention(ChunkedAttention):
    """The same with a backend whose decodes can be captured in a graph."""

    def capture_plan(
        self, max_batch_size: int, max_pages: int, page_size: int, device: torch.device
    ) -> ChunkedPlan:
        backend = self.backend
        whole = backend.capture_plan(max_batch_size, max_pages, page_size, device)
        has_host_values = isinstance(whole, HostPlan)
        if has_host_values:
            # A graph has one host value per name, but two plans would need two.
            backend = TorchAttention()
        pages = min(max_pages, self.size // page_size)
        local = backend.capture_plan(max_batch_size, pages, page_size, device)
        self._page_size = page_size
        return (_HostChunkedPlan if has_host_values else ChunkedPlan)(whole, local, backend)

    def update_plan(self, plan: Any, metadata: AttentionMetadata, batch_size: int) -> None:
        self.backend.update_plan(plan.whole, metadata, batch_size)
        chunks = chunks_of(metadata, self._page_size, self.size)
        plan.local_backend.update_plan(plan.local, chunks, batch_size)


def chunks_of(metadata: AttentionMetadata, page_size: int, size: int) -> AttentionMetadata:
    """Return `metadata` with one request for each chunk that a request has new tokens in.

    If no request is longer than a chunk, `metadata` is returned as it is.
    """
    if max(metadata.seq_lens, default=0) <= size:
        return metadata
    assert size % page_size == 0
    requests, first_pages, query_lens, seq_lens = [], [], [], []
    for request, (new, end) in enumerate(zip(metadata.query_lens, metadata.seq_lens, strict=True)):
        begin = end - new
        while begin < end:
            chunk = begin // size * size
            stop = min(chunk + size, end)
            requests.append(request)
            first_pages.append(chunk // page_size)
            query_lens.append(stop - begin)
            seq_lens.append(stop - chunk)
            begin = stop
    table = metadata.block_table
    width = -(-max(seq_lens) // page_size)
    columns = np.array(first_pages)[:, None] + np.arange(width)
    places = np.array(requests)[:, None] * table.shape[1]
    (here,) = to_device([places + columns.clip(max=table.shape[1] - 1)], table.device)
    return replace(
        metadata, query_lens=query_lens, seq_lens=seq_lens, block_table=table.flatten()[here]
    )
