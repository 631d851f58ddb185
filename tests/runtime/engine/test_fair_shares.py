"""Prompts of different lengths share the steps: none waits for a much longer one, and none starves.

Time is counted in tokens of steps, which is what it costs a device that computes.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_runner import VOCAB, ToyRunner, continuation, drain, make_core, tokens

from piecework.runtime.core.batch import Batch
from piecework.runtime.core.generation import GenerateRequest
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.engine.core import EngineCore
from piecework.runtime.engine.fair_shares import FairShares

BUDGET = 256


class CountingRunner(ToyRunner):
    """Counts the tokens of each step, and computes nothing."""

    def forward(self, batch: Batch) -> torch.Tensor:
        self.step_tokens.append(batch.num_tokens)
        return torch.zeros(batch.num_tokens, 1, dtype=torch.int64)


def request(
    rid: str, length: int, arrival: int, tokens: int = 1, priority: int = 0
) -> GenerateRequest:
    params = SamplingParams(temperature=0.0, max_new_tokens=tokens, ignore_eos=True)
    prompt = [(7 * length + 3 * position) % VOCAB for position in range(length)]
    return GenerateRequest(
        rid=rid,
        input_ids=prompt,
        params=params,
        arrival_time=float(arrival),
        priority=priority,
    )


def core_of(budget: int = BUDGET) -> tuple[EngineCore, ToyRunner]:
    return make_core(num_pages=4000, page_size=4, token_budget=budget, runner_class=CountingRunner)


def times_to_first_token(jobs: list[tuple[int, int]], budget: int = BUDGET) -> list[int]:
    """Return the tokens computed from each arrival to its answer. Jobs are (step, length)."""
    core, runner = core_of(budget)
    begun, taken = dict[str, int](), dict[str, int]()
    for step in range(10_000):
        for number, (arrival, length) in enumerate(jobs):
            if arrival == step:
                core.add(request(f"r{number}", length, arrival))
                begun[f"r{number}"] = sum(runner.step_tokens)
        outputs = core.step().outputs if core.has_work else []
        taken |= {each.rid: sum(runner.step_tokens) - begun[each.rid] for each in outputs}
        if len(taken) == len(jobs):
            break
    return [taken[f"r{number}"] for number in range(len(jobs))]


@pytest.mark.parametrize("length", [60, 250, 800])
@pytest.mark.parametrize("arrivals", [(0, 0), (0, 3), (3, 0)])
@pytest.mark.parametrize("long", [5000, 8000])
def test_a_long_prompt_and_a_short_one_hardly_notice_each_other(
    long: int, length: int, arrivals: tuple[int, int]
) -> None:
    of_long, of_short = times_to_first_token([(arrivals[0], long), (arrivals[1], length)])
    assert of_short <= 1.5 * length
    assert of_long <= 1.2 * long


def test_prompts_of_one_length_are_computed_one_after_another() -> None:
    first, second = times_to_first_token([(0, 3000), (0, 2999)])
    assert sorted((first, second)) == [pytest.approx(3000, abs=2), 5999]


def test_short_prompts_go_together() -> None:
    core, runner = core_of()
    for number in range(7):
        core.add(request(f"r{number}", 30 + number, 0))
    drain(core)
    assert runner.step_tokens == [sum(range(30, 37))]


def test_an_urgent_prompt_does_not_wait_for_a_shorter_one() -> None:
    core, _ = core_of()
    core.add(request("short", 200, 0))
    core.add(request("urgent", 2000, 1, priority=1))
    ended = [output.rid for _ in range(30) for output in core.step().outputs]
    assert ended == ["urgent", "short"]


def test_decodes_that_began_later_go_on_beside_a_long_prompt() -> None:
    core, _ = make_core(num_pages=4000, page_size=4, token_budget=16)
    core.add(request("long", 2000, 0))
    core.step()
    later = request("short", 4, 1, tokens=5)
    core.add(later)
    got = [each for _ in range(6) for each in core.step().outputs]
    assert tokens(got) == continuation(later.input_ids, 5)


def test_a_prefix_that_a_running_prompt_computes_is_computed_once() -> None:
    core, runner = core_of()
    core.add(request("long", 4000, 0))
    core.step()
    beginning = request("long", 4000, 0).input_ids[:1000]
    params = SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True)
    same = GenerateRequest(
        rid="same", input_ids=[*beginning, 1, 2], params=params, arrival_time=1.0
    )
    core.add(same)
    drain(core)
    assert sum(runner.step_tokens) <= 4000 + 2 + 4


lengths = st.integers(1, 3000)


@settings(deadline=None, max_examples=60)
@given(
    budget=st.integers(1, 600),
    waiting=st.lists(st.tuples(lengths, st.integers(-1, 1)), min_size=1, max_size=6),
    arriving=st.lists(st.tuples(st.integers(1, 50), st.integers(-1, 1)), min_size=1, max_size=9),
)
def test_no_prompt_starves_however_many_short_ones_arrive(
    budget: int, waiting: list[tuple[int, int]], arriving: list[tuple[int, int]]
) -> None:
    """New prompts of the same or a lower priority arrive at each step, as many as fill it."""
    shares = FairShares(budget)
    left = sorted(([length, priority] for length, priority in waiting), key=lambda one: -one[1])
    first = left[0]
    # A third of the tokens, and what the steps before have not paid back yet.
    for _ in range(3 * first[0] // budget + 3 * first[0] + 9):
        new = [[length, min(priority, first[1])] for length, priority in arriving]
        left = sorted([*left, *new], key=lambda one: -one[1])[:40]
        urgent = sum(priority == left[0][1] for _, priority in left)
        given = shares.divide(budget, [length for length, _ in left], urgent)
        assert 0 < sum(given) <= budget
        assert all(0 <= share <= length for share, (length, _) in zip(given, left, strict=True))
        for one, share in zip(left, given, strict=True):
            one[0] -= share
        left = [one for one in left if one[0]]
        if not first[0]:
            return
    raise AssertionError(f"{first[0]} tokens of the first prompt are left")


@settings(deadline=None, max_examples=20)
@given(
    jobs=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 700)), min_size=1, max_size=9),
    budget=st.integers(8, 300),
)
def test_every_prompt_ends_and_none_much_later_than_all_of_them_take(
    jobs: list[tuple[int, int]], budget: int
) -> None:
    took = times_to_first_token(jobs, budget)
    assert max(took) <= sum(length for _, length in jobs)
