"""Models with a recurrent state: a slot a request, whose content is what its tokens made of it,
whoever had the slot before and whoever gives way.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from served_answers import arrivals_of, core_of, jobs_of_several, serve, sizes_of_all_kinds
from toy_runner import RecurrentToyRunner, assert_idle, make_core

from piecework.runtime.engine.messages import GenerateRequest
from piecework.runtime.sampling.params import SamplingParams


@settings(deadline=None, max_examples=40)
@given(
    jobs=jobs_of_several,
    sizes=sizes_of_all_kinds,
    aborts=st.dictionaries(
        st.integers(0, 25), st.lists(st.integers(0, 9).map("r{}".format), max_size=3), max_size=4
    ),
    overlap=st.booleans(),
)
def test_states_tell_of_the_same_tokens_as_pages(
    jobs: list[Any], sizes: dict[str, Any], aborts: dict[int, list[str]], overlap: bool
) -> None:
    arrivals = arrivals_of(jobs)
    whole = serve(core_of(False, **sizes), arrivals)
    answers = serve(core_of(overlap, **sizes, state_slots=9), arrivals, aborts)
    for rid, answer in answers.items():
        assert answer.tokens == whole[rid].tokens[: len(answer.tokens)]
        assert answer.end is None or answer.end == whole[rid].end


@pytest.mark.parametrize("slots", [2, 3])
def test_more_requests_than_slots_wait_for_one(slots: int) -> None:
    core, _ = make_core(max_running_requests=8, runner_class=RecurrentToyRunner, state_slots=slots)
    params = SamplingParams(temperature=0.0, max_new_tokens=3, ignore_eos=True)
    for number in range(5):
        core.add(GenerateRequest(rid=str(number), input_ids=[number] * 9, params=params))
    most = 0
    while core.has_work:
        core.step()
        core.check()
        most = max(most, core.stats().running_requests)
    assert most == slots - 1
    assert_idle(core)
