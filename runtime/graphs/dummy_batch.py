"""Batches of made-up tokens, to warm up kernels, to measure memory, and to capture and check
graphs.

Their keys and values are stored in the reserved page only.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch

from ...kernels.attention import AttentionMetadata
from ...kernels.platform.device import Device
from ..core.padding import RESERVED_PAGE, RESERVED_SLOT
from ..core.step_adapters import StepAdapters


class DummyBatch(NamedTuple):
    """The arguments of a forward. `input_ids` and `positions` are [T] int64."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    metadata: AttentionMetadata


def dummy_batch(
    query_lens: list[int], seq_lens: list[int], platform: Device, page_size: int, seed: int = 0
) -> DummyBatch:
    """Build a batch of the last `query_lens` tokens of sequences of `seq_lens` tokens.

    Another seed gives other tokens.
    """
    device = platform.device()
    positions = torch.cat(
        [torch.arange(seq - new, seq) for new, seq in zip(query_lens, seq_lens, strict=True)]
    )
    pages = -(-max(seq_lens) // page_size)
    slots = positions % page_size + RESERVED_PAGE * page_size
    metadata = AttentionMetadata(
        query_lens=query_lens,
        seq_lens=seq_lens,
        block_table=torch.full(
            (len(seq_lens), pages), RESERVED_PAGE, dtype=platform.slot_dtype, device=device
        ),
        slot_mapping=slots.to(device, platform.slot_dtype),
        state_slots=torch.full((len(seq_lens),), RESERVED_SLOT, device=device),
    )
    return DummyBatch(
        ((7 * positions + 13 * seed) % 97).to(device),
        positions.to(device),
        # Layers of windows use the same metadata: every page is the reserved one.
        replace(metadata, window=metadata),
    )


def dummy_prefill(num_tokens: int, seed: int, platform: Device, page_size: int) -> DummyBatch:
    """Build equal prompts of a page each. The last one may be shorter.

    They share the reserved page, so a slot is written several times in one step. The prompts are
    equal, so it gets the same numbers each time.
    """
    whole, rest = divmod(num_tokens, page_size)
    lens = [page_size] * whole + [rest] * (rest > 0)
    return dummy_batch(lens, lens, platform, page_size, seed)


def dummy_decode(batch_size: int, seed: int, platform: Device, page_size: int) -> DummyBatch:
    """Build decodes of `batch_size` requests of 1, 2, ... tokens up to a page, then from 1 again.

    Another seed starts at another length. This detects a graph that has recorded lengths.
    """
    lens = [(number + seed) % page_size + 1 for number in range(batch_size)]
    return dummy_batch([1] * batch_size, lens, platform, page_size, seed)


def dummy_adapters(adapters: StepAdapters | None, num_tokens: int) -> AbstractContextManager[None]:
    """Return a block in which made-up tokens have the adapters of all slots, if there are any."""
    if adapters is None:
        return nullcontext()
    return adapters.using(adapters.dummy_slots(num_tokens))
