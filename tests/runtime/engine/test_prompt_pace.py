"""Steps that compute a prompt while answers wait take a bounded time, and all texts stay."""

from __future__ import annotations

import itertools
import time
from typing import NamedTuple

import pytest
import torch
from toy_runner import ToyRunner, continuation, make_core

from piecework.runtime.core.batch import Batch
from piecework.runtime.core.generation import GenerateRequest
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.engine.core import EngineCore
from piecework.runtime.engine.prompt_pace import PromptPace

PROMPT, ANSWER = [position % 97 for position in range(1500)], list(range(20))


class Clock:
    """A clock that only steps move."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def make(clock: Clock, pace: PromptPace, seconds: float = 4e-3) -> EngineCore:
    class SlowRunner(ToyRunner):
        """A step takes `seconds`, and 1 ms more for each of its tokens."""

        def forward(self, batch: Batch) -> torch.Tensor:
            clock.now += seconds + 1e-3 * batch.num_tokens
            return super().forward(batch)

    core, _ = make_core(num_pages=600, token_budget=1024, runner_class=SlowRunner, pace=pace)
    return core


def request(rid: str, prompt: list[int], count: int) -> GenerateRequest:
    params = SamplingParams(temperature=0.0, max_new_tokens=count, ignore_eos=True)
    return GenerateRequest(rid=rid, input_ids=prompt, params=params)


def gaps_beside_prompt(core: EngineCore, clock: Clock) -> tuple[list[float], float]:
    """Return the times between tokens of an answer while a prompt is computed, and the prompt's."""
    core.add(request("answer", ANSWER, 300))
    got: dict[str, list[int]] = {}
    times = list[float]()
    while "prompt" not in got:
        if len(times) == 3:
            core.add(request("prompt", PROMPT, 1))
        for output in core.step().outputs:
            got.setdefault(output.rid, []).extend(output.token_ids)
            if output.rid == "answer":
                times.append(clock.now)
    assert got["prompt"] == continuation(PROMPT, 1)
    assert got["answer"] == continuation(ANSWER, len(got["answer"]))
    return [after - before for before, after in itertools.pairwise(times[2:])], (
        clock.now - times[2]
    )


def test_an_answer_waits_for_steps_of_bounded_time(clock: Clock) -> None:
    gaps, seconds = gaps_beside_prompt(make(clock, PromptPace(0.1, clock=clock)), clock)
    assert max(gaps) < 0.11
    assert seconds < 1.1 * len(PROMPT) * 1e-3


def test_a_goal_of_zero_fills_steps(clock: Clock) -> None:
    gaps, _ = gaps_beside_prompt(make(clock, PromptPace(0.0, clock=clock)), clock)
    assert max(gaps) > 1.0


def test_where_decodes_are_slow_a_step_may_take_four_of_them(clock: Clock) -> None:
    core = make(clock, PromptPace(1e-3, clock=clock), seconds=0.049)
    gaps, seconds = gaps_beside_prompt(core, clock)
    assert 3 * 0.05 < max(gaps) < 5 * 0.05
    assert seconds < 1.5 * len(PROMPT) * 1e-3


def test_steps_that_waste_time_become_longer(clock: Clock) -> None:
    """As where cores are busy, and each of a step's many parallel parts waits for all threads."""
    pace = PromptPace(0.1, clock=clock)
    core = make(clock, pace, seconds=0.1)
    core.add(request("alone", PROMPT[::-1], 1))
    while core.has_work:
        core.step()
    alone = clock.now
    gaps, seconds = gaps_beside_prompt(core, clock)
    # Four decodes would take 0.4 s, and a goal of 0.1 s would leave a quantum of 32 tokens.
    assert max(gaps) < 0.6
    assert seconds < 1.7 * alone


def test_a_prompt_that_no_answer_waits_for_fills_steps(clock: Clock) -> None:
    core = make(clock, PromptPace(0.1, clock=clock))
    for rid in ("first", "second"):
        core.add(request(rid, PROMPT, 1))
        began, steps = clock.now, core.stats().steps_total
        while core.has_work:
            core.step()
        assert core.stats().steps_total - steps <= 2
        assert clock.now > began


def test_steps_have_the_length_of_a_captured_graph(clock: Clock) -> None:
    core = make(clock, PromptPace(0.1, lambda: [16, 64, 128, 512], clock=clock))
    runner = core._runner
    gaps_beside_prompt(core, clock)
    assert isinstance(runner, ToyRunner)
    lengths = runner.step_tokens[3:]
    assert len(lengths) > 8 and lengths[2:-1] == [64] * len(lengths[2:-1])


class Step(NamedTuple):
    """What `PromptPace` reads of a step."""

    num_tokens: int
    began: float
    waits: bool = True
    has_prompts: bool = True
    is_mixed: bool = False
    has_given_rows: bool = False


def test_steps_that_nothing_waits_for_are_timed_with_the_next_one(clock: Clock) -> None:
    """A device computes chunks inside of a prompt while the next one is launched."""
    pace = PromptPace(1.0, clock=clock)
    for chunk in range(4):
        clock.now = 0.005 * (chunk + 1)
        pace.read(Step(1000, 0.005 * chunk, waits=False))
    assert pace.limit() is None
    clock.now = 5.0
    pace.read(Step(1000, 0.02))
    assert pace.limit() == 1000


class Steps:
    """Steps of a machine that computes a token in 1 ms, and a first one of 1,024 tokens."""

    def __init__(self, clock: Clock, goal: float, sizes: list[int] | None = None) -> None:
        self._clock, self.pace = clock, PromptPace(goal, lambda: sizes or [], clock)
        self.read(1024, 1.024, is_mixed=False)

    def read(self, tokens: int, seconds: float, *, is_mixed: bool = True) -> None:
        began = self._clock.now
        self._clock.now += seconds
        self.pace.read(Step(tokens, began, is_mixed=is_mixed))

    @property
    def limit(self) -> int:
        limit = self.pace.limit()
        assert limit is not None
        return limit


def test_steps_obey_the_goal_again_after_a_long_time_of_dear_tokens(clock: Clock) -> None:
    steps = Steps(clock, 1.0)
    for count, seconds in ((5000, 0.9), (100, 0.1)):
        for _ in range(count):
            steps.read(100, seconds)
    assert 950 < steps.limit < 1050


def test_a_step_that_a_stopped_machine_prolonged_is_forgotten(clock: Clock) -> None:
    steps = Steps(clock, 1.0)
    steps.read(512, 3600.0)
    count = 0
    while steps.limit < 900:
        tokens = max(32, steps.limit)
        steps.read(tokens, tokens * 1e-3)
        count += 1
    assert count < 150


def test_waste_doubles_steps_at_most_and_is_taken_back(clock: Clock) -> None:
    steps = Steps(clock, 0.1)
    for _ in range(60):
        tokens = steps.limit
        steps.read(tokens, 0.1 + 1e-3 * tokens)
    # 50 tokens would take 0.15 s, three times as long as in a long step.
    assert 90 <= steps.limit <= 105
    for _ in range(60):
        tokens = steps.limit
        steps.read(tokens, 1e-3 * tokens)
    assert 95 <= steps.limit <= 101


def test_a_graph_that_is_far_shorter_is_not_preferred(clock: Clock) -> None:
    assert Steps(clock, 0.1, [16]).limit == 100


def test_any_finite_goal_gives_a_limit(clock: Clock) -> None:
    pace = PromptPace(1e308, clock=clock)
    clock.now = 1.0
    pace.read(Step(10**6, 0.0))
    assert (pace.limit() or 0) > 10**6
