"""Attention without a cache is plain attention of each sequence alone."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from piecework.kernels.attention import AttentionMetadata, KVLayout
from piecework.kernels.varlen_attention import VarlenAttention

NOTHING = torch.empty(0)


@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 80), min_size=1, max_size=9),
    st.booleans(),
    st.none() | st.integers(1, 90),
    st.sampled_from([None, 2.0]),
    st.sampled_from([(4, 4), (4, 2), (3, 1)]),
)
def test_each_sequence_sees_itself_alone(
    lengths: list[int],
    causal: bool,
    window: int | None,
    softcap: float | None,
    heads: tuple[int, int],
) -> None:
    total, (num, shared) = sum(lengths), heads
    generator = torch.Generator().manual_seed(total)
    # Rows of one projection: heads of a token lie side by side, tokens further apart.
    rows = torch.randn(total, num + 2 * shared, 8, generator=generator)
    q, k, v = rows.tensor_split([num, num + shared], dim=1)
    layout = KVLayout(
        num_heads=num,
        num_kv_heads=shared,
        key_size=8,
        value_size=8,
        scale=0.4,
        dtype=torch.float32,
        window=window,
        softcap=softcap,
        causal=causal,
    )
    out, backend = torch.full((total, num, 8), float("nan")), VarlenAttention()
    metadata = AttentionMetadata(
        query_lens=lengths, seq_lens=lengths, block_table=NOTHING, slot_mapping=NOTHING
    )
    backend.run(q, k, v, out, NOTHING, NOTHING, backend.plan(metadata, 1), layout)
    begin = 0
    for length in lengths:
        own = slice(begin, begin + length)
        begin += length
        keys, values = (each[own].repeat_interleave(num // shared, 1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[own], keys) * layout.scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        behind = torch.arange(length)[:, None] - torch.arange(length)
        reach = length if window is None else window
        seen = (behind < reach) & (behind > -reach) & ((behind >= 0) | (not causal))
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        expected = torch.einsum("hqk,khd->qhd", weights, values)
        torch.testing.assert_close(out[own], expected, atol=1e-5, rtol=1e-5)
