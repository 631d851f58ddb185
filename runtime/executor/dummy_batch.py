"""Made-up steps, to capture graphs on and to check them: their keys and values go to the reserved
page and nowhere else.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...kernels.attention import AttentionMetadata
from ...kernels.platform import Platform
from ..cache.pool import RESERVED_PAGE


class DummyBatch(NamedTuple):
    """`input_ids`, `positions` [T] int64."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    metadata: AttentionMetadata


def dummy_prefill(num_tokens: int, seed: int, platform: Platform, page_size: int) -> DummyBatch:
    """Prompts of a page each, all alike, the last one shorter if `num_tokens` says so. Another seed
    gives other tokens.

    They share the reserved page, so a slot is written several times in one step: with the same
    numbers each time, since the prompts are the same.
    """
    whole, rest = divmod(num_tokens, page_size)
    lens = [page_size] * whole + [rest] * (rest > 0)
    return _step(torch.arange(num_tokens) % page_size, lens, lens, seed, platform, page_size)


def dummy_decode(batch_size: int, seed: int, platform: Platform, page_size: int) -> DummyBatch:
    """One token each of `batch_size` requests of 1, 2, ... tokens, up to a page and from 1 again;
    each sees those before it.

    With another seed the lengths begin at another number: a graph that remembers lengths is found
    out by it.
    """
    positions = (torch.arange(batch_size) + seed) % page_size
    return _step(positions, [1] * batch_size, (positions + 1).tolist(), seed, platform, page_size)


def _step(
    positions: torch.Tensor,
    query_lens: list[int],
    seq_lens: list[int],
    seed: int,
    platform: Platform,
    page_size: int,
) -> DummyBatch:
    device = platform.device()
    return DummyBatch(
        ((7 * positions + 13 * seed) % 97).to(device),
        positions.to(device),
        AttentionMetadata(
            query_lens=query_lens,
            seq_lens=seq_lens,
            block_table=torch.full(
                (len(seq_lens), 1), RESERVED_PAGE, dtype=platform.slot_dtype, device=device
            ),
            slot_mapping=(positions + RESERVED_PAGE * page_size).to(device, platform.slot_dtype),
        ),
    )
