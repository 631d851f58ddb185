"""Attention of spans of tokens that see each other in both directions, such as those of an image.

The backend computes causal attention and stores the new keys and values. Then the rows of spans are
computed again, over the cache. All keys of a span must be stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from . import cache_format
from .attention import AttentionMetadata, KVLayout


class Span(NamedTuple):
    """New tokens of a span.

    Attributes:
        request: Number of the request in the step.
        row: Row of its first new token in the step.
        begin, end: Positions of the new tokens in the request.
        start: Position of the span's first token, which may be cached. The span ends at `end`.
    """

    request: int
    row: int
    begin: int
    end: int
    start: int


def attend_spans(
    q: torch.Tensor,
    out: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    metadata: AttentionMetadata,
    layout: KVLayout,
    spans: Sequence[Span],
) -> None:
    """Write attention of the rows of spans of q [T, H, D] into out [T, H, E].

    A query sees all tokens before it, within the window of the layer, and all tokens of its span.
    `caches` are the keys and the values of the layer. Layers must have plain scores.
    """
    if layout.narrow_spans and layout.window is None:
        return
    for span in spans:
        lowest = 0 if layout.window is None else max(0, span.begin - layout.window + 1)
        lowest = min(lowest, span.start)
        size = cache_format.page_size_of(caches[0], layout.num_kv_heads, layout.key_size)
        first = lowest // size
        pages = metadata.block_table[span.request, first : -(-span.end // size)].long()
        scales = layout.k_scale, layout.v_scale
        sizes = layout.key_size, layout.value_size
        keys, values = (
            _read(cache, pages, layout, width, scale)[: span.end - first * size]
            for cache, width, scale in zip(caches, sizes, scales, strict=True)
        )
        queries = torch.arange(span.begin, span.end, device=q.device)[:, None]
        places = torch.arange(first * size, span.end, device=q.device)[None]
        seen, inside = places <= queries, places >= span.start
        if layout.narrow_spans:
            seen |= inside
        if layout.window is not None:
            seen &= places > queries - layout.window
        if not layout.narrow_spans:
            seen |= inside
        rows = slice(span.row, span.row + span.end - span.begin)
        # Each query head reads the head of its group.
        heads = torch.arange(layout.num_heads, device=q.device) + layout.skipped_heads
        heads = heads // layout.group
        attended = F.scaled_dot_product_attention(
            q[rows].transpose(0, 1),
            keys[:, heads].transpose(0, 1),
            values[:, heads].transpose(0, 1),
            attn_mask=seen,
            scale=layout.scale,
        )
        out[rows] = attended.transpose(0, 1).view(out[rows].shape)


def _read(
    cache: torch.Tensor, pages: torch.Tensor, layout: KVLayout, size: int, scale: float
) -> torch.Tensor:
    """Return keys or values [tokens, K, size] of pages."""
    if layout.cache_dtype is None:
        return cache.index_select(0, pages).flatten(0, 1)
    heads = layout.num_kv_heads
    return cache_format.load(cache, pages, heads, size, scale, layout.dtype).flatten(0, 1)
