"""Steps whose tokens are computed as requests of their own.

Row i of a request sees the keys of the rows before it, because a layer writes all keys of a step
before it reads them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...kernels.attention import AttentionMetadata
from ...kernels.staging import to_device


def rows_apart(metadata: AttentionMetadata) -> AttentionMetadata:
    """Return the metadata of a step in which each token is a request with one new token."""
    lens = metadata.query_lens
    (owners,) = to_device([np.arange(len(lens)).repeat(lens)], metadata.block_table.device)
    return replace(
        metadata,
        query_lens=[1] * sum(lens),
        seq_lens=[
            length
            for end, new in zip(metadata.seq_lens, lens, strict=True)
            for length in range(end - new + 1, end + 1)
        ],
        block_table=metadata.block_table[owners],
        window=None if metadata.window is None else rows_apart(metadata.window),
    )


def some_rows(apart: AttentionMetadata, begin: int, end: int) -> AttentionMetadata:
    """Return the metadata of the requests `begin` to `end` - 1 of a step of `rows_apart`."""
    rows = slice(begin, end)
    return replace(
        apart,
        query_lens=apart.query_lens[rows],
        seq_lens=apart.seq_lens[rows],
        block_table=apart.block_table[rows],
        slot_mapping=apart.slot_mapping[rows],
        window=None if apart.window is None else some_rows(apart.window, begin, end),
    )
