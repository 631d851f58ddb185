"""Attention in chunks against the definition, by a backend that knows of none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_steps import Step

from piecework.kernels.chunked_attention import ChunkedGraphAttention, with_chunks
from piecework.kernels.cpu.platform import CpuPlatform
from piecework.kernels.paged_attention import TorchAttention
from piecework.kernels.varlen_attention import VarlenAttention
from piecework.runtime.cache.pool import KVPool

SIZE, PAGE = 8, 4


def chunked(step: Step) -> Step:
    step.heads = replace(step.heads, window=SIZE, chunked=True)
    return step


def computed(step: Step, backend: object, plan: object) -> torch.Tensor:
    out = torch.empty_like(step.q)
    k, v = step.new(step.keys), step.new(step.values)
    backend.run(step.q, k, v, out, step.k_cache, step.v_cache, plan, step.heads)  # type: ignore[attr-defined]
    return out


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 30)), min_size=1, max_size=4),
    st.integers(0, 5),
)
def test_a_step_sees_chunks(lens: list[tuple[int, int]], seed: int) -> None:
    step = chunked(Step(lens, page_size=PAGE, heads=4, seed=seed))
    backend = with_chunks(TorchAttention(), [step.heads])
    said = computed(step, backend, backend.plan(step.metadata, PAGE))
    assert torch.allclose(said, step.expected().float(), atol=1e-4)


def test_a_plan_of_graphs_sees_chunks_however_long_requests_are() -> None:
    backend = with_chunks(
        TorchAttention(), [chunked(Step([(1, 1)], page_size=4, heads=4, seed=0)).heads]
    )
    assert isinstance(backend, ChunkedGraphAttention)
    plan = backend.capture_plan(3, 9, PAGE, torch.device("cpu"))
    for pasts in ((3, 7, 8), (0, 33, 15)):
        step = chunked(Step([(1, past) for past in pasts], page_size=PAGE, heads=4, seed=2))
        for cache in step.k_cache, step.v_cache:
            cache.nan_to_num_()
        backend.update_plan(plan, step.metadata, 3)
        assert torch.allclose(computed(step, backend, plan), step.expected().float(), atol=1e-4)


def test_sequences_without_a_cache_see_chunks() -> None:
    step = chunked(Step([(20, 0), (5, 0), (300, 0)], page_size=PAGE, heads=4, seed=3))
    backend = VarlenAttention()
    said = computed(step, backend, backend.plan(step.metadata, PAGE))
    assert torch.allclose(said, step.expected().float(), atol=1e-4)


def test_chunks_are_whole_pages() -> None:
    layout = chunked(Step([(1, 1)], page_size=4, heads=4, seed=0)).heads
    with pytest.raises(ValueError, match="--page-size 16: the model attends in chunks of 8 tokens"):
        KVPool([layout], num_pages=2, page_size=16, platform=CpuPlatform())
