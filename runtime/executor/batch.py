"""The tensors of one step. T tokens, B requests."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ...kernels.attention import AttentionMetadata
from ...kernels.staging import to_device
from ..cache.slabs import RESERVED_PAGE
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
    def has_decodes(self) -> bool:
        """Whether a request has had its prompt computed, and goes on after what was sampled: with
        one token, or with those that a grammar forced beside it.
        """
        return self.is_decode or any(
            request.num_computed >= request.num_prompt for request, _ in self.scheduled
        )


def _places(
    query_lens: list[int], seq_lens: list[int]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The last row of each request [B]; of each row [T] whose it is, and its position."""
    count, ends = len(query_lens), np.array(seq_lens) - 1
    if sum(query_lens) == count:
        # What follows gives the same; decodes are short, and wait for it.
        rows = np.arange(count)
        return rows, rows, ends
    lens = np.array(query_lens)
    last_rows = lens.cumsum() - 1
    owner = np.arange(count).repeat(lens)
    return last_rows, owner, np.arange(len(owner)) + (ends - last_rows)[owner]


def build_batch(
    scheduled: list[Scheduled],
    page_size: int,
    device: torch.device,
    slot_dtype: torch.dtype,
    sampled: torch.Tensor | None = None,
    *,
    only_windows: bool = False,
) -> Batch:
    """Lay the scheduled tokens out one request after another.

    `sampled` [N] int64: what the step in flight samples; placeholders take their tokens from it, on
    the device. `only_windows`: as of `KVPool`.
    """
    query_lens = [num_new for _, num_new in scheduled]
    seq_lens = [request.num_computed + num_new for request, num_new in scheduled]
    ending, pending = [], []
    for row, ((request, _), seq_len) in enumerate(zip(scheduled, seq_lens, strict=True)):
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
    last_rows, owner, positions = _places(query_lens, seq_lens)
    own = _numpy_dtype(slot_dtype)
    arrays = [input_ids, positions, last_rows[ending]]
    for table in _tables(scheduled, only_windows=only_windows):
        slots = table[owner, positions // page_size] * page_size + positions % page_size
        arrays += [table.astype(own, copy=False), slots.astype(own, copy=False)]
    num_tables = (len(arrays) - 3) // 2
    states = []
    if scheduled[0].request.state is not None:
        states = [(request, request.state.number) for request, _ in scheduled if request.state]
        arrays.append(np.array([slot for _, slot in states]))
    if pending:
        rows = [scheduled[row].request.sampled_row for row in pending]
        arrays += [last_rows[pending], np.array(rows)]
    tensors = iter(to_device(arrays, device))
    ids, places, sample_rows = next(tensors), next(tensors), next(tensors)
    tables = [(next(tensors), next(tensors)) for _ in range(num_tables)]
    state_slots = next(tensors) if states else None
    if pending:
        assert sampled is not None
        ids.index_copy_(0, next(tensors), sampled.index_select(0, next(tensors)))
    metadata = None
    for block_table, slot_mapping in reversed(tables):
        metadata = AttentionMetadata(
            query_lens=query_lens,
            seq_lens=seq_lens,
            block_table=block_table,
            slot_mapping=slot_mapping,
            state_slots=state_slots,
            window=metadata,
        )
    assert metadata is not None
    return Batch(
        scheduled=scheduled,
        input_ids=ids,
        positions=places,
        metadata=metadata,
        samplers=[scheduled[row].request for row in ending],
        sample_rows=sample_rows,
        state_copies=[
            (request.state_source, slot)
            for request, slot in states
            if request.state_source is not None
        ],
        snapshots=[(slot, request.snapshot.number) for request, slot in states if request.snapshot],
    )


def _tables(scheduled: list[Scheduled], *, only_windows: bool) -> Iterator[npt.NDArray[np.int64]]:
    """[B, most] page numbers: of layers that keep all pages, then of those that keep a window's."""
    shape = len(scheduled), max(len(request.pages) for request, _ in scheduled)
    if not only_windows:
        table = np.full(shape, RESERVED_PAGE, np.int64)
        for row, (request, _) in enumerate(scheduled):
            table[row, : len(request.pages)] = request.pages
        yield table
    if scheduled[0].request.window:
        table = np.full(shape, RESERVED_PAGE, np.int64)
        for row, (request, _) in enumerate(scheduled):
            begin, end = request.window_begin, len(request.window)
            table[row, begin:end] = [block.number for block in request.window[begin:]]
        yield table


@cache
def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    return np.dtype(str(dtype).removeprefix("torch."))
