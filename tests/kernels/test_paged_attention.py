"""Paged attention against the definition, token by token, for any mix of chunks, decodes, pages and
windows.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_steps import Step, latent

from piecework.kernels import paged_attention
from piecework.kernels.paged_attention import TorchAttention


@settings(deadline=None, max_examples=120)
@given(
    lens=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=5),
    page_size=st.sampled_from([1, 3, 16]),
    heads=st.sampled_from([2, 6]),
    window=st.sampled_from([None, 1, 4, 100]),
    padding=st.integers(0, 3),
    seed=st.integers(0, 5),
)
def test_it_equals_the_definition(
    lens: list[tuple[int, int]],
    page_size: int,
    heads: int,
    window: int | None,
    padding: int,
    seed: int,
) -> None:
    step = Step(lens, page_size=page_size, heads=heads, seed=seed)
    assert torch.allclose(
        step.run(TorchAttention(), window=window, padding=padding), step.expected(window), atol=1e-4
    )


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("is_latent", [True, False])
def test_prompts_whose_scores_are_many_are_computed_in_parts(
    window: int | None, is_latent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said() -> torch.Tensor:
        lens = [(40, 0), (1, 9), (17, 21)]
        step = Step(lens, page_size=4, heads=4, seed=3, kv_heads=1 if is_latent else 2)
        if is_latent:
            step = latent(step, 6)
        else:
            step.heads = replace(step.heads, softcap=2.0)
        return step.run(TorchAttention(), window=window)

    whole = said()
    monkeypatch.setattr(paged_attention, "_SCORES", 4 * 40 * 7)
    assert torch.allclose(said(), whole, atol=1e-5)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("window", [None, 3])
def test_what_is_no_number_in_rows_that_nobody_wrote_reaches_no_request(
    garbage: float, window: int | None
) -> None:
    step = Step([(1, 3), (1, 20), (4, 5), (1, 0)], page_size=4, heads=4, seed=1)
    for cache in (step.k_cache, step.v_cache):
        cache.nan_to_num_(nan=garbage)
        cache[0] = garbage
    assert torch.allclose(
        step.run(TorchAttention(), window=window), step.expected(window), atol=1e-4
    )


@pytest.mark.parametrize("lens", [[(1, 10)] * 4, [(1, 3), (1, 200), (1, 9)], [(1, 0)]])
def test_decodes_of_any_lengths(lens: list[tuple[int, int]]) -> None:
    step = Step(lens, page_size=16, heads=4, seed=1)
    assert torch.allclose(step.run(TorchAttention()), step.expected(None), atol=1e-4)


def test_new_keys_and_values_are_stored_at_their_slots() -> None:
    step = Step([(3, 2), (1, 4)], page_size=4, heads=2, seed=2)
    step.run(TorchAttention())
    keys, values = step.stored()
    assert torch.equal(keys, step.new(step.keys)) and torch.equal(values, step.new(step.values))


@settings(deadline=None, max_examples=60)
@given(
    past=st.lists(st.integers(0, 20), min_size=1, max_size=5),
    padding=st.integers(0, 3),
    page_size=st.sampled_from([1, 4, 16]),
    window=st.none() | st.integers(1, 12),
    seed=st.integers(0, 1000),
)
def test_a_plan_that_is_updated_in_place(
    past: list[int], padding: int, page_size: int, window: int | None, seed: int
) -> None:
    """Twice over the same plan: what the first step left behind must not be seen by the second,
    shorter one.
    """
    backend = TorchAttention()
    plan = backend.capture_plan(8, 21, page_size, torch.device("cpu"))
    for lens in (past, past[: len(past) // 2 + 1]):
        step = Step([(1, each) for each in lens], page_size=page_size, heads=4, seed=seed)
        backend.update_plan(plan, step.metadata, 8)
        q, k, v = (
            torch.cat((part, torch.ones(padding, *part.shape[1:])))
            for part in (step.q, step.new(step.keys), step.new(step.values))
        )
        out = torch.empty_like(q)
        backend.run(q, k, v, out, step.k_cache, step.v_cache, plan, step.layout(window))
        torch.testing.assert_close(out[: len(lens)], step.expected(window), atol=1e-4, rtol=1e-4)
        assert out.isfinite().all()
