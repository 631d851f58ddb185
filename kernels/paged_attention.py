"""Paged attention in plain torch: the reference of the attention contract, and the backend if no
kernel is faster.

Shapes as in `attention`: T tokens, B requests, H query heads, K key/value heads, D numbers of a
key, E of a value, P pages, S tokens in a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from . import cache_format
from .attention import AttentionMetadata, KVLayout
from .staging import to_device
from .weighed_scores import weigh

# Decodes share one padded call if the longest is at most this many times as long as the shortest.
_DECODE_PADDING = 2
_SCORES = 2**26  # Scores of a prompt that are in memory at once, if scores must be in memory.


@dataclass(slots=True)
class _Prefill:
    """One request with several new tokens: rows [start, stop) of the step. `pages` is None if all
    that it sees is new.
    """

    start: int
    stop: int
    seq_len: int
    pages: torch.Tensor | None


@dataclass(slots=True)
class _Decodes:
    """Requests with one new token each and similar lengths.

    Attributes:
        rows: [b], their tokens in the step. None for the whole step.
        pages: [b * pages of the longest request], flat.
        tail: Rows of the gathered pages that lie after the ends of the requests. None if the
            lengths change in place.
    """

    rows: torch.Tensor | None
    pages: torch.Tensor
    seq_lens: torch.Tensor
    tail: torch.Tensor | None


@dataclass(slots=True)
class TorchPlan:
    """The plan that the layers of a step share. A mask is made by the first layer that needs it."""

    slot_mapping: torch.Tensor
    prefills: list[_Prefill]
    decodes: list[_Decodes]
    masks: dict[tuple[int, int | None], torch.Tensor] = field(default_factory=dict)


class TorchDecodePlan(NamedTuple):
    """Decodes whose tensors change in place: `slot_mapping` [B], `seq_lens` [B], `pages` [B, most].
    A row without a request reads page 0.
    """

    slot_mapping: torch.Tensor
    seq_lens: torch.Tensor
    pages: torch.Tensor

    def first(self, count: int) -> TorchPlan:
        """Return the plan of the first `count` rows, as views. Masks are made at each call, because
        the rows change.
        """
        decodes = _Decodes(None, self.pages[:count].flatten(), self.seq_lens[:count], None)
        return TorchPlan(self.slot_mapping[:count], [], [decodes])


class TorchAttention:
    """Gather each request's pages and call `scaled_dot_product_attention`."""

    def plan(self, metadata: AttentionMetadata, page_size: int) -> TorchPlan:
        starts = [0, *accumulate(metadata.query_lens)]
        prefills, singles = [], []
        for index, (query_len, seq_len) in enumerate(
            zip(metadata.query_lens, metadata.seq_lens, strict=True)
        ):
            if query_len == 1:
                singles.append(index)
            elif query_len > 1:
                pages = (
                    metadata.block_table[index, : -(-seq_len // page_size)]
                    if seq_len > query_len
                    else None
                )
                prefills.append(_Prefill(starts[index], starts[index + 1], seq_len, pages))
        whole = len(singles) == len(metadata.query_lens)
        decodes = [
            _decode_group(group, starts, metadata, page_size, whole and len(group) == len(singles))
            for group in _groups_of_similar_length(singles, metadata.seq_lens)
        ]
        return TorchPlan(metadata.slot_mapping, prefills, decodes)

    def capture_plan(
        self, max_batch_size: int, max_pages: int, page_size: int, device: torch.device
    ) -> TorchDecodePlan:
        """Return a plan for short contexts: `run` gathers `max_pages` pages of each request,
        whatever its length.
        """
        return TorchDecodePlan(
            torch.zeros(max_batch_size, dtype=torch.int64, device=device),
            torch.ones(max_batch_size, dtype=torch.int64, device=device),
            torch.zeros(max_batch_size, max_pages, dtype=torch.int64, device=device),
        )

    def update_plan(
        self, plan: TorchDecodePlan, metadata: AttentionMetadata, batch_size: int
    ) -> None:
        count, width = (
            len(metadata.seq_lens),
            min(metadata.block_table.shape[1], plan.pages.shape[1]),
        )
        plan.slot_mapping.zero_()
        plan.slot_mapping[:count] = metadata.slot_mapping
        plan.seq_lens.fill_(1)
        plan.seq_lens[:count] = to_device([np.array(metadata.seq_lens)], plan.seq_lens.device)[0]
        plan.pages.zero_()
        plan.pages[:count, :width] = metadata.block_table[:, :width]

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: TorchPlan | TorchDecodePlan,
        layout: KVLayout,
    ) -> None:
        if isinstance(plan, TorchDecodePlan):
            plan = plan.first(q.shape[0])
        if layout.group * layout.num_kv_heads != layout.num_heads or layout.skipped_heads:
            self._run_cut(q, k, v, out, k_cache, v_cache, plan, layout)
            return
        slots, new = plan.slot_mapping, plan.slot_mapping.shape[0]
        if layout.cache_dtype is None:
            k_cache.flatten(0, 1).index_copy_(0, slots, k[:new])
            if not layout.latent:
                v_cache.flatten(0, 1).index_copy_(0, slots, v[:new])
        else:
            # Use the numbers as stored, so that a prompt computed in one step gives the same as one
            # computed in chunks.
            k = cache_format.store(k[:new], k_cache, slots, layout.k_scale)
            if layout.latent:
                v = k[..., : layout.value_size]
            else:
                v = cache_format.store(v[:new], v_cache, slots, layout.v_scale)
        layer = _Layer(q, k, v, out, k_cache, v_cache, plan, layout)
        for number, prefill in enumerate(plan.prefills):
            _attend_prefill(layer, number, prefill)
        for number, decodes in enumerate(plan.decodes):
            _attend_decodes(layer, number, decodes)

    def _run_cut(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: TorchPlan,
        layout: KVLayout,
    ) -> None:
        """Run the layer with whole head groups: add heads of zeros where the layer lacks some, and
        leave out heads after the last group.
        """
        heads, skipped = layout.group * layout.num_kv_heads, layout.skipped_heads
        count = min(layout.num_heads, heads - skipped)
        whole = q.new_zeros(len(q), heads, layout.key_size)
        whole[:, skipped : skipped + count] = q[:, :count]
        result = out.new_zeros(len(out), heads, layout.value_size)
        even = replace(layout, num_heads=heads, group_size=None, skipped_heads=0)
        self.run(whole, k, v, result, k_cache, v_cache, plan, even)
        out[:, :count] = result[:, skipped : skipped + count]
        out[:, count:] = 0.0


class _Layer(NamedTuple):
    """The arguments of one `run`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    plan: TorchPlan
    layout: KVLayout

    def gather(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys [pages, S, K, D] and values [pages, S, K, E] of some pages."""
        layout = self.layout

        def read(cache: torch.Tensor, size: int, scale: float) -> torch.Tensor:
            if layout.cache_dtype is None:
                return cache.index_select(0, pages)
            heads, dtype = layout.num_kv_heads, layout.dtype
            return cache_format.load(cache, pages, heads, size, scale, dtype)

        keys = read(self.k_cache, layout.key_size, layout.k_scale)
        if layout.latent:
            return keys, keys[..., : layout.value_size]
        return keys, read(self.v_cache, layout.value_size, layout.v_scale)


def _attend_prefill(layer: _Layer, number: int, prefill: _Prefill) -> None:
    layout, length = layer.layout, prefill.seq_len
    rows, window = slice(prefill.start, prefill.stop), layout.window
    if prefill.pages is None:
        keys, values = layer.k[rows], layer.v[rows]
    else:
        keys, values = (part.flatten(0, 1)[:length] for part in layer.gather(prefill.pages))
    most = prefill.stop - prefill.start
    if not layout.is_plain or layout.key_size != layout.value_size:
        # Torch computes such layers only with all scores in memory.
        most = max(1, _SCORES // (layout.num_heads * length))
    if prefill.stop - prefill.start > most:
        for begin in range(prefill.start, prefill.stop, most):
            end = min(begin + most, prefill.stop)
            seen = length - (prefill.stop - end)
            part = _causal_mask(end - begin, seen, window, layer.q)
            _attend_rows(layer, slice(begin, end), keys[:seen], values[:seen], part)
        return
    mask = None
    if prefill.pages is not None or (window is not None and window < length) or not layout.is_plain:
        mask = layer.plan.masks.get((number, window))
        if mask is None:
            mask = _causal_mask(prefill.stop - prefill.start, length, window, layer.q)
            layer.plan.masks[number, window] = mask
    _attend_rows(layer, rows, keys, values, mask)


def _attend_rows(
    layer: _Layer, rows: slice, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> None:
    """Attend from the rows of one request to its keys [s, K, D] and values [s, K, E]. Without a
    mask, attention is causal.
    """
    q = layer.q[rows]
    if mask is not None and not layer.layout.is_plain:
        positions = torch.arange(len(keys) - len(q), len(keys), device=q.device)[None]
        parts = q[None], keys[None], values[None]
        layer.out[rows] = weigh(*parts, mask, positions, layer.layout)[0]
        return
    attended = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=layer.layout.scale,
        enable_gqa=True,
    )
    layer.out[rows] = attended[0].transpose(0, 1)


def _attend_decodes(layer: _Layer, number: int, decodes: _Decodes) -> None:
    size, layout = decodes.seq_lens.shape[0], layer.layout
    gathered = layer.gather(decodes.pages)
    _clear_tails(decodes, gathered)
    keys, values = (part.view(size, -1, *part.shape[2:]).transpose(1, 2) for part in gathered)
    key = (-1 - number, layout.window)
    mask = layer.plan.masks.get(key)
    if mask is None:
        mask = layer.plan.masks[key] = _length_mask(
            decodes.seq_lens, keys.shape[2], layout.window, layer.q
        )
    queries = layer.q if decodes.rows is None else layer.q.index_select(0, decodes.rows)
    if layout.is_plain:
        # Query heads of one key/value head take the place of query positions, so keys and values
        # are not copied per head.
        grouped = queries[:size].view(size, layout.num_kv_heads, -1, layout.key_size)
        attended = F.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=mask, scale=layout.scale
        ).reshape(size, -1, layout.value_size)
    else:
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        parts, positions = (queries[:size, None], keys, values), decodes.seq_lens[:, None] - 1
        attended = weigh(*parts, mask, positions, layout)[:, 0]
    if decodes.rows is None:
        layer.out[:size] = attended
    else:
        layer.out.index_copy_(0, decodes.rows, attended)


def _clear_tails(decodes: _Decodes, gathered: Sequence[torch.Tensor]) -> None:
    """Write zeros where nothing of the request was stored. A NaN or infinity there would give NaN
    in spite of the mask.
    """
    for part in gathered:
        if decodes.tail is not None:
            part.flatten(0, 1).index_fill_(0, decodes.tail, 0.0)
        else:
            rows = part.view(decodes.seq_lens.shape[0], -1, *part.shape[2:])
            behind = (
                torch.arange(rows.shape[1], device=rows.device)[None] >= decodes.seq_lens[:, None]
            )
            rows.masked_fill_(behind[:, :, None, None], 0.0)


def _groups_of_similar_length(indices: list[int], seq_lens: list[int]) -> list[list[int]]:
    """Split requests so that padding to a group's longest stays within `_DECODE_PADDING`. If one
    group is enough, it keeps the given order.
    """
    if not indices:
        return []
    lengths = [seq_lens[i] for i in indices]
    if max(lengths) <= _DECODE_PADDING * min(lengths):
        return [indices]
    groups: list[list[int]] = []
    for index in sorted(indices, key=lambda i: seq_lens[i]):
        if not groups or seq_lens[index] > _DECODE_PADDING * seq_lens[groups[-1][0]]:
            groups.append([])
        groups[-1].append(index)
    return groups


def _decode_group(
    group: list[int],
    starts: list[int],
    metadata: AttentionMetadata,
    page_size: int,
    whole_step: bool,
) -> _Decodes:
    table = metadata.block_table
    lengths = np.array([metadata.seq_lens[i] for i in group])
    longest = -(-int(lengths.max()) // page_size)
    behind = np.arange(longest * page_size)[None] >= lengths[:, None]
    arrays = [
        lengths,
        np.flatnonzero(behind),
        np.array(group),
        np.array([starts[i] for i in group]),
    ]
    seq_lens, tail, members, rows = to_device(arrays, table.device)
    if whole_step:
        return _Decodes(None, table[:, :longest].flatten(), seq_lens, tail)
    return _Decodes(rows, table.index_select(0, members)[:, :longest].flatten(), seq_lens, tail)


def _additive(visible: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(visible.shape, dtype=like.dtype, device=like.device).masked_fill_(
        ~visible, float("-inf")
    )


def _causal_mask(
    query_len: int, seq_len: int, window: int | None, like: torch.Tensor
) -> torch.Tensor:
    """Return a mask [query_len, seq_len] in which the last query sees every key."""
    position = torch.arange(seq_len - query_len, seq_len, device=like.device)[:, None]
    key = torch.arange(seq_len, device=like.device)[None]
    visible = key <= position
    if window is not None:
        visible &= key > position - window
    return _additive(visible, like)


def _length_mask(
    seq_lens: torch.Tensor, padded_len: int, window: int | None, like: torch.Tensor
) -> torch.Tensor:
    """Return a mask [b, 1, 1, padded_len] that hides the padding after each request."""
    key = torch.arange(padded_len, device=like.device)[None]
    visible = key < seq_lens[:, None]
    if window is not None:
        visible &= key >= seq_lens[:, None] - window
    return _additive(visible, like)[:, None, None, :]
