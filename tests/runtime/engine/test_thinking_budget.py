"""A thought that is too long is closed: the same tokens however steps are launched, and wherever a
request goes on.
"""

from __future__ import annotations

from typing import Any

import pytest
from toy_runner import ToyRunner, assert_idle, continuation, drain, make_core, tokens

from piecework.runtime.core.generation import GenerateRequest
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.core.thought_budget import ThoughtBudget

PROMPT, END, COUNT = [1, 2, 3], [60, 61], 12


def params(budget: int, **more: Any) -> SamplingParams:
    return SamplingParams(
        **{
            "temperature": 0.0,
            "max_new_tokens": COUNT,
            "ignore_eos": True,
            "thinking_budget": budget,
            "thought_end_ids": END,
            **more,
        }
    )


def thought(budget: int, count: int = COUNT) -> list[int]:
    """What comes of an open thought that the model does not close."""
    begun = continuation(PROMPT, budget)
    assert END[0] not in begun
    rest = continuation([*PROMPT, *begun, *END], count)
    return [*begun, *END, *rest][:count]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [0, 1, 4, 11, 12, 99])
def test_a_thought_ends_with_its_budget(budget: int, overlap: bool) -> None:
    core, _ = make_core(overlap=overlap)
    core.add(GenerateRequest(rid="r", input_ids=PROMPT, params=params(budget)))
    core.add(GenerateRequest(rid="free", input_ids=[4, 5], params=params(99)))
    told = drain(core)
    assert tokens(told["r"]) == (thought(budget) if budget < COUNT else continuation(PROMPT, COUNT))
    assert tokens(told["free"]) == continuation([4, 5], COUNT)
    assert_idle(core)


@pytest.mark.parametrize("known", range(COUNT))
def test_a_request_that_goes_on_keeps_its_budget(known: int) -> None:
    whole = thought(4)
    core, _ = make_core(overlap=True)
    if whole[known - 1] == END[0]:
        known += 1  # The mark is told at once.
    core.add(GenerateRequest(rid="r", input_ids=PROMPT, params=params(4), output_ids=whole[:known]))
    assert tokens(drain(core)["r"]) == whole[known:]


def test_only_steps_near_the_budget_wait_for_one_another() -> None:
    core, _ = make_core(overlap=True)
    core.add(GenerateRequest(rid="r", input_ids=PROMPT, params=params(6)))
    drain(core)
    stats = core.stats()
    # The step behind the budget's last token, and nothing else, starts anew.
    assert stats.steps_total - stats.overlapped_steps_total == 2
    assert stats.discarded_tokens_total == 0


def test_preempted_thoughts() -> None:
    core, _ = make_core(num_pages=6, page_size=4, overlap=True)
    for rid in "abc":
        core.add(GenerateRequest(rid=rid, input_ids=PROMPT, params=params(4)))
    told = drain(core)
    assert core.stats().preemptions_total > 0
    assert all(tokens(told[rid]) == thought(4) for rid in "abc")


def test_log_probabilities_are_one_a_token() -> None:
    for budget in (0, 3):
        core, _ = make_core()
        core.add(GenerateRequest(rid="r", input_ids=PROMPT, params=params(budget, logprobs=0)))
        entries = [entry for output in drain(core)["r"] for entry in output.logprobs or ()]
        assert [entry.token_id for entry in entries] == thought(budget)
        assert [entry.logprob for entry in entries][budget : budget + 2] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("begin", "output", "kept"),
    [
        ([50], [50, 1, 2, 3, 4], [50, 1, 2, 3]),
        ([50], [9, 50, 1, 2, 3, 4], [9, 50, 1, 2, 3]),
        ([50], [9, 9, 9, 50, 1, 2, 3, 4], None),
        ([50, 51], [50, 51, 1, 2, 3, 4], [50, 51, 1, 2, 3]),
        ([], [1, *END, 3, 4, 5, 6], None),
        ([], [1, 2, 60, 61], [1, 2, 60]),
    ],
)
def test_what_a_thought_is(begin: list[int], output: list[int], kept: list[int] | None) -> None:
    budget = ThoughtBudget(params(3, thought_begin_ids=begin), [])
    told = [budget.follow([token]) for token in output]
    ends = [place for place, (_, closing) in enumerate(told) if closing]
    assert ends == ([] if kept is None else [len(kept) - 1])
    whole = ThoughtBudget(params(3, thought_begin_ids=begin), [])
    assert whole.follow(output) == ((output, []) if kept is None else (kept, END))


def test_parameters_that_contradict() -> None:
    with pytest.raises(ValueError, match="thinking_budget must be at least 0, got -1"):
        params(-1)
    with pytest.raises(ValueError, match="thinking_budget needs thought_end_ids"):
        params(3, thought_end_ids=[])
    core, _ = make_core(runner_class=ToyRunner)
    core.add(GenerateRequest(rid="r", input_ids=PROMPT, params=params(3, thought_end_ids=[10**6])))
    (output,) = drain(core)["r"]
    assert "thought_end_ids take token ids" in (output.error or "")
