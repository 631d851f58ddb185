"""The plan of a step for layers with a recurrent state: decodes in one call, prompts in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from .staging import to_device

# Tokens of a prompt that are computed by products of matrices. States go from chunk to chunk.
CHUNK = 64


class Taps(NamedTuple):
    """The rows that a convolution of K columns reads and keeps.

    Its input are (K - 1) kept rows of each prompt, then all new rows.

    Attributes:
        read: [K, tokens] rows that the columns read for each token.
        kept: [prompts * (K - 1)] rows to keep for the next step.
    """

    read: torch.Tensor
    kept: torch.Tensor


@dataclass(slots=True)
class Prompts:
    """Requests with several new tokens.

    Tokens are counted from the first token of the first prompt. Chunks [n, CHUNK] hold tokens.

    Attributes:
        rows: Their rows of the step.
        slots: The slots of their states.
        spans: [2, requests] int64 on the host, their first rows and their lengths.
        owners: The prompt of each chunk.
        tokens: [n, CHUNK] tokens of the chunks.
        valid: [n, CHUNK] 0 after the end of a prompt, 1 elsewhere. Where it is 0, a chunk repeats
            the prompt's first token, which must not change a state.
        places: Places of the tokens in the flattened chunks, in order.
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
        """Return the taps of a convolution of `width` columns, made by the first layer that needs
        them.
        """
        if width not in self._taps:
            self._taps[width] = _make_taps(self.lens, width, self.rows.device)
        return self._taps[width]


class StatePlan(NamedTuple):
    """The plan of a step of `num_tokens`.

    Attributes:
        slots: [b] slots of the requests with one new token.
        rows: [b] rows of their tokens. None for all rows, in order.
    """

    num_tokens: int
    slots: torch.Tensor
    rows: torch.Tensor | None
    prompts: Prompts | None


def plan_states(query_lens: Sequence[int], slots: torch.Tensor) -> StatePlan:
    """Return the plan of a step for all of its layers. For the arguments see `StateMetadata`."""
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
    """Return the taps. The rows of a prompt are its kept rows and then its new rows. A token reads
    the `width` rows that end with its own, and the last `width - 1` rows are kept.
    """
    kept, lengths = width - 1, np.array(lens)
    starts = lengths.cumsum() - lengths
    owner = np.arange(len(lengths)).repeat(lengths)
    inside = np.arange(len(owner)) - starts[owner]

    def source(owner: np.ndarray[Any, Any], place: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the input row of row `place` of a prompt."""
        new = len(lengths) * kept + starts[owner] + place - kept
        rows: np.ndarray[Any, Any] = np.where(place < kept, owner * kept + place, new)
        return rows

    read = source(owner[None], inside[None] + np.arange(width)[:, None])
    last = source(np.arange(len(lengths))[:, None], lengths[:, None] + np.arange(kept)[None])
    return Taps(*to_device([read, last.reshape(-1)], device))
