"""Overlapped steps: the same tokens as without, whatever the requests ask for, and nothing waits
that need not.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from served_answers import core_of, serve
from toy_runner import VOCAB

from piecework.runtime.engine.messages import (
    GenerateRequest,
)
from piecework.runtime.sampling.params import SamplingParams


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    count = draw(st.sampled_from([0, 1, 2, 7, 20]))
    wanted: dict[str, Any] = {
        "max_new_tokens": count,
        "min_new_tokens": draw(st.integers(0, min(count, 4))),
        "temperature": draw(st.sampled_from([0.0, 0.0, 0.5, 1.5])),
        "top_k": draw(st.sampled_from([-1, -1, 3])),
        "top_p": draw(st.sampled_from([1.0, 0.7])),
        "seed": draw(st.sampled_from([None, 1, 99])),
        "ignore_eos": draw(st.booleans()),
        "stop_token_ids": draw(st.lists(st.integers(0, VOCAB - 1), max_size=12)),
        "logprobs": draw(st.sampled_from([None, None, 0, 3])),
        "prompt_logprobs": draw(st.sampled_from([None, None, 0, 2])),
        "prompt_logprobs_start": draw(st.sampled_from([0, 3])),
    }
    if draw(st.booleans()):
        wanted["repetition_penalty"] = draw(st.sampled_from([1.0, 1.7, 0.6]))
        wanted["presence_penalty"] = draw(st.sampled_from([0.0, 1.3]))
        wanted["frequency_penalty"] = draw(st.sampled_from([0.0, 0.7]))
        wanted["logit_bias"] = draw(
            st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-50.0, 2.5]), max_size=3)
        )
    return SamplingParams(**wanted)


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=40)
jobs_of_several = st.lists(
    st.tuples(prompts, sampling_params(), st.integers(0, 8), st.integers(-1, 1), st.integers(0, 3)),
    min_size=1,
    max_size=10,
)
sizes_of_all_kinds = st.fixed_dictionaries(
    {
        "num_pages": st.integers(17, 40),
        "page_size": st.sampled_from([1, 4, 16]),
        "token_budget": st.integers(1, 48),
        "max_running_requests": st.integers(1, 6),
        "share_prefixes": st.booleans(),
    }
)


def arrivals_of(
    jobs: list[tuple[list[int], SamplingParams, int, int, int]],
) -> list[tuple[int, GenerateRequest]]:
    """Some resume from tokens that were delivered before."""
    return [
        (
            delay,
            GenerateRequest(
                rid=f"r{number}",
                input_ids=prompt,
                params=params,
                output_ids=[5, 6, 7][: min(resumed, max(0, params.max_new_tokens - 1))],
                priority=priority,
                arrival_time=float(number),
            ),
        )
        for number, (prompt, params, delay, priority, resumed) in enumerate(jobs)
    ]


@settings(deadline=None, max_examples=250)
@given(jobs=jobs_of_several, sizes=sizes_of_all_kinds)
def test_answers_are_those_of_steps_one_after_another(
    jobs: list[Any], sizes: dict[str, Any]
) -> None:
    arrivals = arrivals_of(jobs)
    assert serve(core_of(True, **sizes), arrivals) == serve(core_of(False, **sizes), arrivals)


@settings(deadline=None, max_examples=120)
@given(
    jobs=jobs_of_several,
    sizes=sizes_of_all_kinds,
    aborts=st.dictionaries(
        st.integers(0, 25), st.lists(st.integers(0, 9).map("r{}".format), max_size=3), max_size=6
    ),
    flushes=st.frozensets(st.integers(0, 25), max_size=4),
)
def test_aborts_at_any_moment_change_no_other_answer(
    jobs: list[Any], sizes: dict[str, Any], aborts: dict[int, list[str]], flushes: frozenset[int]
) -> None:
    arrivals = arrivals_of(jobs)
    whole = serve(core_of(False, **sizes), arrivals)
    answers = serve(core_of(True, **sizes), arrivals, aborts, flushes)
    for rid, answer in answers.items():
        if answer.end is not None:
            assert answer == whole[rid]
        else:
            assert answer.tokens == whole[rid].tokens[: len(answer.tokens)]


@settings(deadline=None, max_examples=40)
@given(sizes=sizes_of_all_kinds, params=sampling_params(), count=st.integers(2, 5))
def test_samples_of_one_prompt(sizes: dict[str, Any], params: SamplingParams, count: int) -> None:
    arrivals = [
        (
            0,
            GenerateRequest(
                rid=f"r{n}", input_ids=[1, 2, 1, 2, 0] * 3, params=params, arrival_time=float(n)
            ),
        )
        for n in range(count)
    ]
    assert serve(core_of(True, **sizes), arrivals) == serve(core_of(False, **sizes), arrivals)
