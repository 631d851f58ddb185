"""Overlapped steps: the same tokens as without, whatever the requests ask for, and nothing waits
that need not.
"""

from __future__ import annotations

from typing import Any

from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from served_answers import (
    arrivals_of,
    core_of,
    jobs_of_several,
    sampling_params,
    serve,
    sizes_of_all_kinds,
)

from piecework.runtime.core.generation import GenerateRequest
from piecework.runtime.core.sampling_params import SamplingParams


@settings(deadline=None, max_examples=examples(30, exploring=250))
@given(jobs=jobs_of_several, sizes=sizes_of_all_kinds)
def test_answers_are_those_of_steps_one_after_another(
    jobs: list[Any], sizes: dict[str, Any]
) -> None:
    arrivals = arrivals_of(jobs)
    assert serve(core_of(True, **sizes), arrivals) == serve(core_of(False, **sizes), arrivals)


@settings(deadline=None, max_examples=examples(20, exploring=120))
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


@settings(deadline=None, max_examples=examples(15, exploring=40))
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
