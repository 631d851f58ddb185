"""The tensors of one step. T tokens, B requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ..kernels.attention import AttentionMetadata
from ..kernels.staging import to_device
from .cache.allocator import RESERVED_PAGE
from .request import Request


class Scheduled(NamedTuple):
    """`num_new` tokens of a request, from its `num_computed` on, are computed in this step."""

    request: Request
    num_new: int

    @property
    def reaches_end(self) -> bool:
        """Whether the last token is among them, so that the next one can be sampled."""
        return self.request.num_computed + self.num_new == self.request.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """`input_ids`, `positions` [T] int64, request after request. `sample_rows`: rows whose logits give `samplers` their next token."""

    scheduled: list[Scheduled]
    input_ids: torch.Tensor
    positions: torch.Tensor
    metadata: AttentionMetadata
    samplers: list[Request]
    sample_rows: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]

    @property
    def is_decode(self) -> bool:
        """Whether every request has one new token."""
        return self.num_tokens == len(self.scheduled)


def build_batch(scheduled: list[Scheduled], page_size: int, device: torch.device, slot_dtype: torch.dtype) -> Batch:
    """Lay the scheduled tokens out one request after another."""
    query_lens = [num_new for _, num_new in scheduled]
    seq_lens = [request.num_computed + num_new for request, num_new in scheduled]
    table = np.full((len(scheduled), max(len(request.pages) for request, _ in scheduled)), RESERVED_PAGE, np.int64)
    for row, (request, _) in enumerate(scheduled):
        table[row, : len(request.pages)] = request.pages
    spans = list(zip(scheduled, seq_lens, strict=True))
    input_ids = np.concatenate([entry.request.tokens[end - entry.num_new : end] for entry, end in spans])
    positions = np.concatenate([np.arange(end - entry.num_new, end) for entry, end in spans])
    owner = np.repeat(np.arange(len(scheduled)), query_lens)
    slots = table[owner, positions // page_size] * page_size + positions % page_size
    last_rows = np.cumsum(query_lens) - 1
    ending = [row for row, entry in enumerate(scheduled) if entry.reaches_end and entry.request.params.max_new_tokens > 0]

    own = np.dtype(str(slot_dtype).removeprefix("torch."))
    tensors = to_device([input_ids, positions, table.astype(own, copy=False), slots.astype(own, copy=False), last_rows[ending]], device)
    return Batch(
        scheduled=scheduled,
        input_ids=tensors[0],
        positions=tensors[1],
        metadata=AttentionMetadata(query_lens=query_lens, seq_lens=seq_lens, block_table=tensors[2], slot_mapping=tensors[3]),
        samplers=[scheduled[row].request for row in ending],
        sample_rows=tensors[4],
    )
