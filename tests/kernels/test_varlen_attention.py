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
    st.sampled_from([None, 0.1]),
    st.sampled_from([(4, 4), (4, 2), (3, 1)]),
)
def test_each_sequence_sees_itself_alone(
    lengths: list[int],
    causal: bool,
    window: int | None,
    softcap: float | None,
    slope: float | None,
    heads: tuple[int, int],
) -> None:
    total, (num, shared) = sum(lengths), heads
    generator = torch.Generator().manual_seed(total)
    # Rows of one projection: heads of a token lie side by side, tokens further apart.
    rows = torch.randn(total, num + 2 * shared, 8, generator=generator)
    q, k, v = rows.tensor_split([num, num + shared], dim=1)
    slopes = None if slope is None else slope / torch.arange(1, num + 1)
    layout = KVLayout(
        num_heads=num,
        num_kv_heads=shared,
        key_size=8,
        value_size=8,
        scale=0.4,
        dtype=torch.float32,
        window=window,
        softcap=softcap,
        slopes=slopes,
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
        if slopes is not None:
            scores -= slopes[:, None, None] * behind
        reach = length if window is None else window
        seen = (behind < reach) & (behind > -reach) & ((behind >= 0) | (not causal))
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        expected = torch.einsum("hqk,khd->qhd", weights, values)
        torch.testing.assert_close(out[own], expected, atol=1e-5, rtol=1e-5)


def test_a_bias_is_added_to_the_scores_of_each_sequence() -> None:
    lengths, heads = [3, 5, 300, 290], 2
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, sum(lengths), heads, 8, generator=generator).unbind()

    def bias(queries: torch.Tensor, keys: torch.Tensor, begin: int) -> torch.Tensor:
        places = torch.arange(begin, begin + queries.shape[2])
        far = (places[:, None] - torch.arange(keys.shape[2])).float()
        return far / 50 + queries[..., :1] * keys[..., :1].transpose(-1, -2)

    layout = KVLayout(
        num_heads=heads,
        num_kv_heads=heads,
        key_size=8,
        value_size=8,
        scale=0.4,
        dtype=torch.float32,
        causal=False,
        bias=bias,
    )
    out, backend = torch.full_like(q, float("nan")), VarlenAttention()
    metadata = AttentionMetadata(
        query_lens=lengths, seq_lens=lengths, block_table=NOTHING, slot_mapping=NOTHING
    )
    backend.run(q, k, v, out, NOTHING, NOTHING, backend.plan(metadata, 1), layout)
    parts = zip(*(each.split(lengths) for each in (q, k, v)), strict=True)
    expected = []
    for queries, keys, values in ([each.transpose(0, 1) for each in part] for part in parts):
        scores = queries @ keys.transpose(-1, -2) * layout.scale + bias(
            queries[None], keys[None], 0
        )
        expected.append((scores[0].softmax(-1) @ values).transpose(0, 1))
    torch.testing.assert_close(out, torch.cat(expected), atol=1e-5, rtol=1e-5)
