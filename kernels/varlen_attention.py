"""Attention without a cache: the sequences of a step lie one after another, and each attends to
itself. Encoders and other models with one result per text use it.

T tokens, H query heads, K key/value heads, D numbers of a key, E of a value, L tokens of a
sequence, n sequences of one length.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from .attention import AttentionMetadata, KVLayout
from .staging import to_device
from .weighed_scores import weigh

# Pad sequences to a common length of at most `_SHORT`, or if padding adds at most 50 % more tokens.
_SHORT, _PADDING = 32, 1.5
_BLOCK = 256  # Queries of a sliding window, or of scores with a bias, that are computed at once.


class Run(NamedTuple):
    """`number` consecutive sequences of `length` tokens each. The first begins at token `start`."""

    start: int
    number: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.number * self.length

    def sequences(self, x: torch.Tensor) -> torch.Tensor:
        """Return its sequences of x [T, ...] as a view [n, L, ...]."""
        return x[self.start : self.stop].view(self.number, self.length, *x.shape[1:])


def equal_runs(lengths: Sequence[int]) -> list[Run]:
    """Return the sequences of a step, with consecutive ones of the same length joined."""
    runs, start = [], 0
    for length, group in groupby(lengths):
        runs.append(Run(start, len(list(group)), length))
        start = runs[-1].stop
    return runs


class Group(NamedTuple):
    """Consecutive sequences of similar length that are padded to the longest, in attention only.

    Attributes:
        rows: [n, L] rows of the tokens of each, 0 after its end.
        seen: [n, 1, 1, L] False for padding.
        back: Places of the tokens in [n * L].
    """

    start: int
    stop: int
    rows: torch.Tensor
    seen: torch.Tensor
    back: torch.Tensor


class VarlenPlan:
    """The plan that the layers of a step share: the sequences by length, and which of them are
    padded.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.runs = equal_runs(lengths)
        self.longest = max(lengths)
        self._groups: list[Run | Group] | None = None

    def groups(self, device: torch.device) -> list[Run | Group]:
        """Return the groups to compute. Few calls for many lengths are faster: a call costs more
        than padding short sequences.
        """
        if self._groups is None:
            self._groups = [
                part[0] if len(part) == 1 else _padded(part, device) for part in _alike(self.runs)
            ]
        return self._groups


def _alike(runs: Sequence[Run]) -> list[list[Run]]:
    """Return lists of consecutive runs, each of which is padded to one length."""
    parts: list[list[Run]] = []
    for run in runs:
        if parts:
            both = [*parts[-1], run]
            longest = max(each.length for each in both)
            padded = longest * sum(each.number for each in both)
            if longest <= _SHORT or padded <= _PADDING * sum(
                each.number * each.length for each in both
            ):
                parts[-1] = both
                continue
        parts.append([run])
    return parts


def _padded(runs: Sequence[Run], device: torch.device) -> Group:
    lengths = np.array([run.length for run in runs for _ in range(run.number)])
    places = np.arange(lengths.max())
    seen = places < lengths[:, None]
    firsts = lengths.cumsum() - lengths
    rows = np.where(seen, firsts[:, None] + places, 0)
    arrays = [rows, seen[:, None, None], np.flatnonzero(seen)]
    return Group(runs[0].start, runs[-1].stop, *to_device(arrays, device))


class VarlenAttention:
    """An `AttentionBackend` without a cache. Every token of a sequence is new.

    It calls `scaled_dot_product_attention` for consecutive sequences of similar length, so sort
    sequences by length.
    """

    def plan(self, metadata: AttentionMetadata, page_size: int) -> VarlenPlan:
        return VarlenPlan(metadata.query_lens)

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
        slides = layout.window is not None and layout.window < plan.longest
        if slides or not layout.is_plain:
            for run in plan.runs:
                _slide(_parts(run, q, k, v), run.sequences(out), layout, layout.window)
            return
        for group in plan.groups(q.device):
            if isinstance(group, Run):
                attended = _attend(_parts(group, q, k, v), layout, causal=layout.causal)
                group.sequences(out).copy_(attended.transpose(1, 2))
            else:
                _attend_padded(group, (q, k, v), out, layout)


def _parts(run: Run, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(run.sequences(each).transpose(1, 2) for each in tensors)


def _attend_padded(
    group: Group, tensors: tuple[torch.Tensor, ...], out: torch.Tensor, layout: KVLayout
) -> None:
    own = slice(group.start, group.stop)
    parts = tuple(each[own][group.rows].transpose(1, 2) for each in tensors)
    # A causal query never sees padding, because padding comes after all tokens.
    mask = None if layout.causal else group.seen
    attended = _attend(parts, layout, mask=mask, causal=layout.causal).transpose(1, 2)
    torch.index_select(attended.flatten(0, 1), 0, group.back, out=out[own])


def _slide(
    parts: tuple[torch.Tensor, ...], target: torch.Tensor, layout: KVLayout, window: int | None
) -> None:
    """Attend with a sliding window, or with scores that are not plain: q, k, v [n, heads, L, ...]
    into target [n, L, H, E].
    """
    q, k, v = parts
    length = q.shape[2]
    window = length if window is None else min(window, length)
    ahead = 0 if layout.causal else window - 1
    places = torch.arange(length, device=q.device)
    for begin in range(0, length, _BLOCK):
        end = min(begin + _BLOCK, length)
        keys = slice(max(0, begin - window + 1), min(length, end + ahead))
        distance = places[begin:end, None] - places[keys]
        seen = (distance < window) & (distance >= -ahead)
        if layout.chunked:
            seen &= places[keys] >= places[begin:end, None] // window * window
        block = q[:, :, begin:end], k[:, :, keys], v[:, :, keys]
        if layout.is_plain:
            target[:, begin:end].copy_(_attend(block, layout, mask=seen).transpose(1, 2))
        else:
            unseen = torch.zeros(seen.shape, device=q.device).masked_fill_(~seen, float("-inf"))
            queries, held, values = (each.transpose(1, 2) for each in block)
            positions = places[None, begin:end] - keys.start
            weighed = weigh(queries, held, values, unseen, positions, layout)
            target[:, begin:end].copy_(weighed)


def _attend(
    parts: tuple[torch.Tensor, ...],
    layout: KVLayout,
    *,
    mask: torch.Tensor | None = None,
    causal: bool = False,
) -> torch.Tensor:
    q, k, v = parts
    if layout.bias is not None:
        return _attend_biased(q, k, v, layout, mask)
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=causal,
        scale=layout.scale,
        enable_gqa=layout.num_heads != layout.num_kv_heads,
    )


def _attend_biased(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: KVLayout, seen: torch.Tensor | None
) -> torch.Tensor:
    """Attend with a bias. It has a number for each pair of tokens, so a block of queries is
    computed at a time.
    """
    assert layout.bias is not None
    blocks = []
    for begin in range(0, q.shape[2], _BLOCK):
        block = q[:, :, begin : begin + _BLOCK]
        bias = layout.bias(block, k, begin)
        if seen is not None:
            bias = bias.masked_fill(~seen, float("-inf"))
        blocks.append(
            F.scaled_dot_product_attention(block, k, v, attn_mask=bias, scale=layout.scale)
        )
    return torch.cat(blocks, dim=2)
