"""Penalties, bias and bans of a batch: each row as its own definition says, whether or not the host
knows its last token.
"""

from __future__ import annotations

import tracemalloc
from collections import Counter
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from piecework.runtime.core.generation import GenerateRequest
from piecework.runtime.core.request import Request
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.sampling.logits_processors import TokenCounts, adjust, processors_for

VOCAB = 7

tokens = st.lists(st.integers(0, VOCAB - 1), max_size=90)
params = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 1.7, 0.6]),
    presence_penalty=st.sampled_from([0.0, 1.3, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    logit_bias=st.dictionaries(
        st.integers(0, VOCAB - 1), st.sampled_from([-100.0, 2.5]), max_size=2
    ),
    min_new_tokens=st.sampled_from([0, 3]),
    stop_token_ids=st.sampled_from([[], [2, 5]]),
)
sequences = st.tuples(tokens.filter(bool), tokens, params)


def request(prompt: list[int], output: list[int], params: SamplingParams) -> Request:
    message = GenerateRequest(rid="r", input_ids=prompt, output_ids=output, params=params)
    return Request(
        message,
        seed=0,
        stop_ids=frozenset(params.stop_token_ids),
        max_tokens=10_000,
        make_processors=processors_for,
    )


def adjusted(
    row: list[float], prompt: list[int], output: list[int], params: SamplingParams
) -> list[float]:
    """A row of logits by the definitions, number by number."""
    row = row.copy()
    for token in {*prompt, *output}:
        row[token] = (
            row[token] / params.repetition_penalty
            if row[token] > 0
            else row[token] * params.repetition_penalty
        )
    for token, count in Counter(output).items():
        row[token] -= params.presence_penalty + params.frequency_penalty * count
    for token, bias in params.logit_bias.items():
        row[token] += bias
    if len(output) < params.min_new_tokens:
        for token in params.stop_token_ids:
            row[token] = float("-inf")
    return row


def some_logits(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(rows))


def test_repetition_penalty_covers_prompt_and_output() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0]])
    adjust(logits, [request([0], [1], SamplingParams(repetition_penalty=2.0))])
    assert logits.tolist() == [[1.0, -4.0, 1.0]]


def test_presence_and_frequency_penalties_cover_the_output_only() -> None:
    logits = torch.zeros(1, 4)
    adjust(
        logits,
        [request([3, 3], [0, 0, 1], SamplingParams(presence_penalty=0.5, frequency_penalty=0.25))],
    )
    assert logits.tolist() == [[-1.0, -0.75, 0.0, 0.0]]


@given(st.lists(sequences, min_size=1, max_size=5))
def test_every_row_of_a_batch_is_adjusted_as_defined(
    batch: list[tuple[list[int], list[int], SamplingParams]],
) -> None:
    logits = some_logits(len(batch))
    want = [adjusted(row, *sequence) for row, sequence in zip(logits.tolist(), batch, strict=True)]
    adjust(logits, [request(*sequence) for sequence in batch])
    np.testing.assert_allclose(logits.numpy(), want, rtol=1e-6, atol=1e-6)


@given(
    st.lists(st.tuples(sequences, st.none() | st.integers(0, VOCAB - 1)), min_size=1, max_size=5),
    st.randoms(),
)
def test_a_pending_token_counts_like_one_that_is_known(
    batch: list[tuple[tuple[list[int], list[int], SamplingParams], int | None]], random: Random
) -> None:
    order = random.sample(range(8), len(batch))
    sampled = torch.full((8,), VOCAB - 1)
    known, pending = [], []
    for place, ((prompt, output, params), last) in zip(order, batch, strict=True):
        known.append(request(prompt, output + ([] if last is None else [last]), params))
        pending.append(request(prompt, output, params))
        if last is not None:
            sampled[place] = last
            pending[-1].add_placeholder(place)
    want, got = some_logits(len(batch)), some_logits(len(batch))
    adjust(want, known)
    adjust(got, pending, sampled)
    assert torch.equal(got, want)


@pytest.mark.parametrize("stop", [-1, VOCAB, VOCAB + 3])
def test_an_end_token_outside_of_the_vocabulary_bans_nothing_of_another_row(stop: int) -> None:
    logits = some_logits(3)
    params = SamplingParams(min_new_tokens=5)
    adjust(
        logits,
        [
            Request(
                GenerateRequest(rid="r", input_ids=[1], params=params),
                seed=0,
                stop_ids=frozenset({stop}),
                max_tokens=10,
                make_processors=processors_for,
            )
        ]
        * 3,
    )
    assert torch.equal(logits, some_logits(3))


@example([1, 2], [list(range(300)), [7, 7]])
@given(tokens, st.lists(st.lists(st.integers(0, 300), max_size=90), max_size=6))
def test_tokens_are_counted_as_they_come(prompt: list[int], parts: list[list[int]]) -> None:
    counts, output = TokenCounts(np.array(prompt, np.int64)), np.zeros(0, np.int64)
    for part in [[], *parts]:
        output = np.concatenate((output, np.array(part, np.int64)))
        ids, times = counts.of(output)
        occurring = Counter(output.tolist())
        assert dict(zip(ids.tolist(), times.tolist(), strict=True)) == {
            token: occurring[token] for token in {*prompt, *output.tolist()}
        }


@pytest.mark.parametrize("wanted", [{}, {"temperature": 0.0}])
def test_logits_of_requests_that_ask_for_nothing_stay_as_they_are(wanted: dict[str, float]) -> None:
    logits = some_logits(2)
    adjust(logits, [request([1], [2], SamplingParams(**wanted)) for _ in range(2)])
    assert torch.equal(logits, some_logits(2))


def test_a_request_that_waits_has_counted_nothing() -> None:
    """Hundreds of long prompts may be in the queue; counts of each are many times its tokens."""
    prompt = np.arange(20_000)
    tracemalloc.start()
    try:
        waiting = [
            processors_for(SamplingParams(repetition_penalty=1.1), prompt, frozenset())
            for _ in range(50)
        ]
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert all(waiting) and held < 2**20
