"""Models with a recurrent state: a slot a request, whose content is what its tokens made of it,
whoever had the slot before and whoever gives way.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from served_answers import arrivals_of, core_of, jobs_of_several, serve, sizes_of_all_kinds
from toy_runner import (
    RecurrentToyRunner,
    ToyRunner,
    assert_idle,
    continuation,
    drain,
    make_core,
    tokens,
)

from piecework.runtime.cache.kinds import make_cache
from piecework.runtime.core.generation import GenerateRequest
from piecework.runtime.core.request import Request
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.engine.core import EngineCore


@settings(deadline=None, max_examples=15)
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
        stats = core.stats()
        assert (stats.states_used, stats.states_total) == (stats.running_requests, slots - 1)
        assert stats.cache_share == stats.states_used / stats.states_total
        most = max(most, stats.running_requests)
    assert most == slots - 1
    assert_idle(core)


def asked(core: EngineCore, rid: str, prompt: list[int], count: int = 1, **more: Any) -> None:
    params = SamplingParams(temperature=0.0, max_new_tokens=count, ignore_eos=True)
    core.add(GenerateRequest(rid=rid, input_ids=prompt, params=params, **more))


def cached(core: EngineCore, prompt: list[int], count: int = 1) -> int:
    """How many tokens of a prompt the prefix cache had."""
    asked(core, "r", prompt, count)
    outputs = drain(core)["r"]
    assert tokens(outputs) == continuation(prompt, count)
    return outputs[0].cached_tokens


def recurrent_core(**sizes: Any) -> tuple[EngineCore, ToyRunner]:
    return make_core(runner_class=RecurrentToyRunner, state_slots=9, **sizes)


def test_a_prompt_that_comes_again_goes_on_behind_its_last_whole_page() -> None:
    core, _ = recurrent_core(token_budget=16)
    prompt = [3 * n % 50 for n in range(40)]
    assert [cached(core, prompt), cached(core, prompt), cached(core, [*prompt, 1])] == [
        0,
        36,
        40,
    ]


def test_prompts_that_part_ways_share_what_they_have_in_common_from_the_third_on() -> None:
    core, _ = recurrent_core()
    system = [n % 7 for n in range(20)]
    assert [cached(core, system + [n] * 20) for n in (1, 2, 3)] == [0, 0, 20]


def test_a_long_prompt_in_many_chunks_leaves_few_snapshots() -> None:
    """It would push out those of all others."""
    core, _ = make_core(
        num_pages=400, token_budget=4, state_slots=13,
        runner_class=lambda *sizes: RecurrentToyRunner(*sizes, 13),
    )  # fmt: skip
    system = [n % 7 for n in range(20)]
    assert cached(core, system) == 0
    assert cached(core, [n % 50 + 8 for n in range(132)]) == 0
    assert cached(core, [*system, 1]) == 20
    assert cached(core, [*(n % 50 + 8 for n in range(70)), 1]) == 64


def test_a_second_turn_goes_on_behind_the_first_answer() -> None:
    core, _ = recurrent_core()
    prompt = list(range(10))
    assert cached(core, prompt, 20) == 0
    assert cached(core, [*prompt, *continuation(prompt, 20), 7, 7]) == 28


def test_who_gives_way_goes_on_from_the_last_snapshot() -> None:
    core, runner = recurrent_core(max_running_requests=1)
    asked(core, "patient", list(range(10)), 20)
    for _ in range(12):
        core.step()
    asked(core, "urgent", [9], 2, priority=1)
    outputs = drain(core)
    assert tokens(outputs["urgent"]) == continuation([9], 2)
    assert core.stats().preemptions_total == 1
    assert runner.step_tokens[12:15] == [1, 1, 1], "twenty of its 21 tokens were saved"


def test_snapshots_give_way_to_requests_that_run() -> None:
    core, _ = make_core(
        num_pages=129, runner_class=RecurrentToyRunner, state_slots=4, max_running_requests=3
    )
    for number in range(6):
        cached(core, [number] * 20)
    for number in range(3):
        asked(core, f"r{number}", [number + 10] * 20, 5)
    assert len(drain(core)) == 3
    core.flush_cache()
    assert (core.cache.used_slots, core.cache.total_slots) == (0, 3)


def test_snapshots_of_answers_give_way_to_requests_that_begin() -> None:
    core, _ = make_core(runner_class=RecurrentToyRunner, state_slots=4, max_running_requests=3)
    for number in range(3):
        asked(core, str(number), [number] * 3, 60)
        for _ in range(12):
            core.step()
            core.check()
        assert core.stats().running_requests == number + 1
    outputs = drain(core)
    assert all(tokens(outputs[rid])[-1] == continuation([int(rid)] * 3, 60)[-1] for rid in outputs)


def test_a_snapshot_that_is_used_outlives_those_that_are_not() -> None:
    core, _ = make_core(runner_class=RecurrentToyRunner, state_slots=5)
    system = [n % 7 for n in range(20)]
    assert cached(core, system) == 0
    for number in range(8):
        assert cached(core, [number + 20] * 20) == 0
        assert cached(core, [*system, number]) == 20


def test_prompts_that_begin_alike_wait_only_for_a_snapshot_that_serves_them() -> None:
    def begun(length: int) -> int:
        core, _ = recurrent_core()
        for number in range(3):
            asked(core, str(number), [1, 2, 3, 4] + [number] * (length - 4))
        core.step()
        return core.stats().running_requests

    assert begun(5) == 1, "the first takes a snapshot behind what they have in common"
    assert begun(9) == 3


def test_a_step_that_is_planned_anew_and_ends_elsewhere_takes_no_snapshot() -> None:
    cache = make_cache(20, 4, share_prefixes=True, state_slots=4, snapshot_tokens=4)
    params = SamplingParams(max_new_tokens=1)
    message = GenerateRequest(rid="r", input_ids=list(range(10)), params=params)
    request = Request(message, seed=0, stop_ids=frozenset(), max_tokens=11)
    cache.attach(request)
    for planned in (8, 7):
        assert cache.reserve(request, planned)
        assert (request.snapshot is not None) == (planned == 8)
        cache.check([request])
    cache.advance(request, 7)
    assert not request.saved
