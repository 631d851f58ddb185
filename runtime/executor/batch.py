"""The tensors of one step. T tokens, B requests."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from ...kernels.attention import AttentionMetadata
from ...kernels.staging import to_device
from ..cache.pool import RESERVED_PAGE
from ..engine.request import Request


class Scheduled(NamedTuple):
    """`num_new` tokens of a request, from its `num_computed` on, are computed in this step."""

    request: Request
    num_new: int


def digest(scheduled: list[Scheduled]) -> tuple[int, int, int]:
    """(requests, tokens, checksum): what two plans differ in if they are not the same."""
    plan = [
        (request.rid, request.num_computed, num_new, len(request.pages), request.pages[-1])
        for request, num_new in scheduled
    ]
    tokens = sum(num_new for _, num_new in scheduled)
    return len(plan), tokens, zlib.crc32(repr(plan).encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """`input_ids`, `positions` [T] int64, request after request. `sample_rows`: rows whose logits
    give `samplers` their next token. `state_copies`: from which slot to
    which states are copied before the step, `snapshots`: behind it.
    """

    scheduled: list[Scheduled]
    input_ids: torch.Tensor
    positions: torch.Tensor
    metadata: AttentionMetadata
    samplers: list[Request]
    sample_rows: torch.Tensor
    state_copies: list[tuple[int, int]]
    snapshots: list[tuple[int, int]]

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]

    @property
    def is_decode(self) -> bool:
        """Whether every request has one new token."""
        return self.num_tokens == len(self.scheduled)

    @property
    def extends_outputs(self) -> bool:
        """Whether it is a decode, or would be but for tokens that a grammar forced, which a request
        has beside the one that was sampled last.
        """
        return self.is_decode or all(
            request.num_computed >= request.num_prompt for request, _ in self.scheduled
        )


def build_batch(
    scheduled: list[Scheduled],
    page_size: int,
    device: torch.device,
    slot_dtype: torch.dtype,
    sampled: torch.Tensor | None = None,
) -> Batch:
    """Lay the scheduled tokens out one request after another.

    `sampled` [N] int64: what the step in flight samples; placeholders take their tokens from it, on
    the device.
    """
    query_lens = [num_new for _, num_new in scheduled]
    seq_lens = [request.num_computed + num_new for request, num_new in scheduled]
    table = np.full(
        (len(scheduled), max(len(request.pages) for request, _ in scheduled)),
        RESERVED_PAGE,
        np.int64,
    )
    ending, pending = [], []
    for row, ((request, _), seq_len) in enumerate(zip(scheduled, seq_lens, strict=True)):
        table[row, : len(request.pages)] = request.pages
        if seq_len == request.num_tokens and request.params.max_new_tokens > 0:
            ending.append(row)
        if request.num_placeholders:
            pending.append(row)
    input_ids = np.concatenate(
        [
            request.span(end - num_new, end)
            for (request, num_new), end in zip(scheduled, seq_lens, strict=True)
        ]
    )
    lens = np.array(query_lens)
    last_rows = lens.cumsum() - 1
    owner = np.arange(len(lens)).repeat(lens)
    positions = np.arange(len(owner)) + (np.array(seq_lens) - 1 - last_rows)[owner]
    slots = table[owner, positions // page_size] * page_size + positions % page_size

    own = _numpy_dtype(slot_dtype)
    arrays = [
        input_ids,
        positions,
        table.astype(own, copy=False),
        slots.astype(own, copy=False),
        last_rows[ending],
    ]
    if pending:
        arrays += [
            last_rows[pending],
            np.array([scheduled[row].request.sampled_row for row in pending]),
        ]
    states = [(request, request.state.number) for request, _ in scheduled if request.state]
    if states:
        arrays.append(np.array([slot for _, slot in states]))
    tensors = to_device(arrays, device)
    if pending:
        assert sampled is not None
        tensors[0].index_copy_(0, tensors[5], sampled.index_select(0, tensors[6]))
    return Batch(
        scheduled=scheduled,
        input_ids=tensors[0],
        positions=tensors[1],
        metadata=AttentionMetadata(
            query_lens=query_lens,
            seq_lens=seq_lens,
            block_table=tensors[2],
            slot_mapping=tensors[3],
            state_slots=tensors[-1] if states else None,
        ),
        samplers=[scheduled[row].request for row in ending],
        sample_rows=tensors[4],
        state_copies=[
            (request.state_source, slot)
            for request, slot in states
            if request.state_source is not None
        ],
        snapshots=[(slot, request.snapshot.number) for request, slot in states if request.snapshot],
    )


@cache
def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    return np.dtype(str(dtype).removeprefix("torch."))
