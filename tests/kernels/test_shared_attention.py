"""Decodes that begin with the same pages: the C++ attention reads those once for all of them, and
each gets what it gets alone.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from native_variants import AttentionWay, attention_ways, errors_of
from paged_steps import Step, quantized

from piecework.kernels.paged_attention import TorchAttention


@pytest.fixture(scope="module")
def variants() -> list[AttentionWay]:
    return attention_ways()


def share(step: Step, shared: list[int]) -> Step:
    """Each request begins with so many pages of the one before it, as far as both have them
    whole.
    """
    table = step.metadata.block_table
    past = [seq - new for seq, new in zip(step.seq_lens, step.query_lens, strict=True)]
    for row in range(1, len(past)):
        pages = min(shared[row], min(past[row - 1 : row + 1]) // step.page_size)
        table[row, :pages] = table[row - 1, :pages]
        for numbers in (step.keys, step.values):
            numbers[row][: pages * step.page_size] = numbers[row - 1][: pages * step.page_size]
    return step


REQUESTS = st.lists(
    st.tuples(st.integers(0, 500), st.sampled_from([1, 1, 1, 1, 5]), st.integers(0, 40)),
    min_size=2,
    max_size=6,
)


@settings(max_examples=25)
@given(
    requests=REQUESTS,
    page_size=st.sampled_from([1, 16, 64]),
    group=st.sampled_from([1, 3, 4, 7]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    window=st.sampled_from([None, None, 70]),
)
@example([(640, 1, 0), *[(700, 1, 40)] * 40], 16, 3, torch.bfloat16, None)
@example([(300, 1, 0), (400, 1, 18), (300, 1, 5), (300, 1, 18)], 16, 4, torch.bfloat16, None)
@example([(300, 1, 0), (300, 5, 18), (300, 1, 18), (64, 1, 4)], 16, 1, torch.float32, None)
def test_each_gets_what_it_gets_alone(
    variants: list[AttentionWay],
    requests: list[tuple[int, int, int]],
    page_size: int,
    group: int,
    dtype: torch.dtype,
    window: int | None,
) -> None:
    lens = [(new, past) for past, new, _ in requests]
    step = Step(lens, page_size=page_size, heads=2 * group, head_size=32, seed=1, dtype=dtype)
    share(step, [pages for *_, pages in requests])
    expected = step.expected(window)
    for backend in variants:
        actual = step.run(backend, window=window).double()
        assert torch.allclose(actual, expected, **errors_of(backend, dtype))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("softcap", "slope"), [(None, None), (5.0, None), (None, 0.02)])
def test_in_8_bits_with_caps_sinks_and_slopes(
    variants: list[AttentionWay], threads: int, softcap: float | None, slope: float | None
) -> None:
    step = Step([(1, 400)] * 5, page_size=16, heads=6, head_size=64, seed=3, dtype=torch.bfloat16)
    step, _, _ = quantized(share(step, [20] * 5), torch.int8)
    slopes = None if slope is None else slope * torch.arange(6)
    step.heads = replace(step.heads, softcap=softcap, sinks=torch.randn(6), slopes=slopes)
    expected = step.run(TorchAttention()).float()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for backend in variants:
            assert torch.allclose(step.run(backend).float(), expected, atol=2e-2)
    finally:
        torch.set_num_threads(before)
