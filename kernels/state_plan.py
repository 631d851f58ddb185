"""Who the tokens of one step belong to, as layers with a recurrent state take them: decodes in one
call, prompts in chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from .staging import to_device

CHUNK = 64
"""Tokens of a prompt that are computed by products of matrices; states go from one chunk to the
next.
"""


class Taps(NamedTuple):
    """Of a convolution of K columns over rows of the prompts, (K - 1) kept ones of each, then all
    new ones: what each token's columns read [K, tokens], and what is kept then [prompts * (K - 1)].
    """

    read: torch.Tensor
    kept: torch.Tensor


@dataclass(slots=True)
class Prompts:
    """Requests with several new tokens: `rows` of the step are theirs, and their states lie at
    `slots`. `spans` [2, requests] int64, on the host: their first rows and their lengths.
    `owners`: of each chunk, whose it is of them.

    Chunks [n, CHUNK] hold tokens, counted from the first prompt's first: `tokens`; `valid` is 0
    where a prompt has ended, so that what stands there (a token of its own) changes no state;
    `places`: which of them all are the tokens, in their order.
    """

    lens: list[int]
    spans: np.ndarray[Any, Any]
    rows: torch.Tensor
    slots: torch.Tensor
    owners: list[int]
    tokens: torch.Tensor
    valid: torch.Tensor
    places: torch.Tensor
    _taps: dict[int, Taps] = field(default_factory=dict)

    def taps(self, width: int) -> Taps:
        """Of a convolution of `width` columns; made at the first layer that needs them."""
        if width not in self._taps:
            self._taps[width] = _make_taps(self.lens, width, self.rows.device)
        return self._taps[width]


class StatePlan(NamedTuple):
    """Of a step of `num_tokens`. Requests with one new token: their states lie at `slots` [b],
    their tokens are `rows` [b] of the step; None: all of it, in order.
    """

    num_tokens: int
    slots: torch.Tensor
    rows: torch.Tensor | None
    prompts: Prompts | None


def plan_states(query_lens: Sequence[int], slots: torch.Tensor) -> StatePlan:
    """The plan of a step, for all of its layers; arguments as of `StateMetadata`."""
    lens = np.array(query_lens)
    single = lens == 1
    if single.all():
        return StatePlan(len(lens), slots, None, None)
    starts = lens.cumsum() - lens
    tokens, valid, owners = [], [], []
    begin = 0
    for owner, length in enumerate(lens[~single].tolist()):
        inside = np.arange(-(-length // CHUNK) * CHUNK)
        tokens.append(begin + np.where(inside < length, inside, 0))
        valid.append(inside < length)
        owners += [owner] * (len(inside) // CHUNK)
        begin += length
    is_valid = np.concatenate(valid)
    arrays = [
        starts[single],
        single.nonzero()[0],
        (~single).repeat(lens).nonzero()[0],
        (~single).nonzero()[0],
        np.concatenate(tokens).reshape(-1, CHUNK),
        is_valid.astype(np.float32).reshape(-1, CHUNK),
        is_valid.nonzero()[0],
    ]
    rows, decodes, prompt_rows, requests, *chunks = to_device(arrays, slots.device)
    prompts = Prompts(
        lens=lens[~single].tolist(),
        spans=np.stack((starts[~single], lens[~single])).astype(np.int64),
        rows=prompt_rows,
        slots=slots.index_select(0, requests),
        owners=owners,
        tokens=chunks[0],
        valid=chunks[1],
        places=chunks[2],
    )
    return StatePlan(int(lens.sum()), slots.index_select(0, decodes), rows, prompts)


def _make_taps(lens: Sequence[int], width: int, device: torch.device) -> Taps:
    """A prompt's rows are its kept ones and then its new ones: a token reads the `width` that end
    with its own, and the last `width - 1` are kept.
    """
    kept, lengths = width - 1, np.array(lens)
    starts = lengths.cumsum() - lengths
    owner = np.arange(len(lengths)).repeat(lengths)
    inside = np.arange(len(owner)) - starts[owner]

    def source(owner: np.ndarray[Any, Any], place: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Of the row `place` of a prompt's own."""
        new = len(lengths) * kept + starts[owner] + place - kept
        rows: np.ndarray[Any, Any] = np.where(place < kept, owner * kept + place, new)
        return rows

    read = source(owner[None], inside[None] + np.arange(width)[:, None])
    last = source(np.arange(len(lengths))[:, None], lengths[:, None] + np.arange(kept)[None])
    return Taps(*to_device([read, last.reshape(-1)], device))
