"""Attention without a cache: the sequences of a step lie one after another, and each sees itself
alone. Encoders and other models that are asked for one result a text need no more.

T tokens, H query heads, K key/value heads, D numbers of a key, E of a value, L tokens of a
sequence, n sequences of one length.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from .attention import AttentionMetadata, KVLayout
from .paged_attention import weigh

_BLOCK = 256
"""Queries of a sliding window that are computed at once: of the keys, only those that they see."""


class Run(NamedTuple):
    """`number` neighbouring sequences of `length` tokens each, the first of which is token
    `start`.
    """

    start: int
    number: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.number * self.length

    def sequences(self, x: torch.Tensor) -> torch.Tensor:
        """Those of x [T, ...]: a view [n, L, ...]."""
        return x[self.start : self.stop].view(self.number, self.length, *x.shape[1:])


def equal_runs(lengths: Sequence[int]) -> list[Run]:
    """The sequences of a step, those of one length that lie side by side together."""
    runs, start = [], 0
    for length, group in groupby(lengths):
        runs.append(Run(start, len(list(group)), length))
        start = runs[-1].stop
    return runs


class VarlenAttention:
    """An `AttentionBackend` that keeps nothing: one call of `scaled_dot_product_attention` for all
    sequences of a length, so sort them. Every token of a sequence is new.
    """

    def plan(self, metadata: AttentionMetadata, page_size: int) -> list[Run]:
        return equal_runs(metadata.query_lens)

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: Any,
        layout: KVLayout,
    ) -> None:
        """Write attention of q [T, H, D] over k [T, K, D] and v [T, K, E] into out [T, H, E]."""
        for run in plan:
            parts = tuple(run.sequences(each).transpose(1, 2) for each in (q, k, v))
            target = run.sequences(out)
            if layout.is_plain and (layout.window is None or layout.window >= run.length):
                target.copy_(_attend(parts, layout, causal=layout.causal).transpose(1, 2))
            else:
                _slide(parts, target, layout, layout.window or run.length)


def _slide(
    parts: tuple[torch.Tensor, ...], target: torch.Tensor, layout: KVLayout, window: int
) -> None:
    """The same with a sliding window, or with scores that are no plain ones: q, k, v [n, heads, L,
    ...] into target [n, L, H, E].
    """
    q, k, v = parts
    length, ahead = q.shape[2], 0 if layout.causal else window - 1
    places = torch.arange(length, device=q.device)
    for begin in range(0, length, _BLOCK):
        end = min(begin + _BLOCK, length)
        keys = slice(max(0, begin - window + 1), min(length, end + ahead))
        distance = places[begin:end, None] - places[keys]
        seen = (distance < window) & (distance >= -ahead)
        block = q[:, :, begin:end], k[:, :, keys], v[:, :, keys]
        if layout.is_plain:
            target[:, begin:end].copy_(_attend(block, layout, mask=seen).transpose(1, 2))
        else:
            unseen = torch.zeros(seen.shape, device=q.device).masked_fill_(~seen, float("-inf"))
            queries, held, values = (each.transpose(1, 2) for each in block)
            target[:, begin:end].copy_(weigh(queries, held, values, unseen, layout))


def _attend(
    parts: tuple[torch.Tensor, ...],
    layout: KVLayout,
    *,
    mask: torch.Tensor | None = None,
    causal: bool = False,
) -> torch.Tensor:
    q, k, v = parts
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=causal,
        scale=layout.scale,
        enable_gqa=layout.num_heads != layout.num_kv_heads,
    )
