"""The engine core: every request gets its own tokens whatever the budget, the crowd and the
shortage of pages; no page is lost.
"""

from __future__ import annotations

import time

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_runner import (
    VOCAB,
    ToyRunner,
    WholeStepToyRunner,
    assert_idle,
    continuation,
    drain,
    make_core,
    tokens,
)

from piecework.runtime.core.batch import Batch
from piecework.runtime.core.generation import FinishReason, GenerateRequest
from piecework.runtime.core.sampling_params import SamplingParams


def request(rid: str, prompt: list[int], count: int, **kwargs: object) -> GenerateRequest:
    params = SamplingParams(temperature=0.0, max_new_tokens=count, ignore_eos=True)
    return GenerateRequest(rid=rid, input_ids=prompt, params=params, **kwargs)  # type: ignore[arg-type]


lengths = st.integers(1, 40)
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=40)


@settings(deadline=None, max_examples=examples(60, exploring=150))
@given(
    jobs=st.lists(
        st.tuples(prompts, st.integers(1, 20), st.integers(0, 6), st.integers(-1, 1)),
        min_size=1,
        max_size=12,
    ),
    num_pages=st.integers(17, 40),
    page_size=st.sampled_from([1, 4, 16]),
    token_budget=st.integers(1, 48),
    max_running=st.integers(1, 6),
    share=st.booleans(),
)
def test_every_request_gets_its_own_tokens(
    jobs: list[tuple[list[int], int, int, int]],
    num_pages: int,
    page_size: int,
    token_budget: int,
    max_running: int,
    share: bool,
) -> None:
    """Prompts over three tokens share prefixes often; few pages force preemption; requests arrive
    at different steps.
    """
    core, _ = make_core(
        num_pages=num_pages,
        page_size=page_size,
        token_budget=token_budget,
        max_running_requests=max_running,
        share_prefixes=share,
    )
    got: dict[str, list[int]] = {}
    pending = [
        (delay, request(f"r{i}", prompt, count, arrival_time=float(i), priority=priority))
        for i, (prompt, count, delay, priority) in enumerate(jobs)
    ]
    capacity = (num_pages - 1) * page_size
    for step in range(5000):
        for _, message in [entry for entry in pending if entry[0] == step]:
            core.add(message)
        if step > 6 and not core.has_work:
            break
        for output in core.step().outputs if core.has_work else []:
            got.setdefault(output.rid, []).extend(output.token_ids)
        core.check()
    else:
        raise AssertionError("the scheduler does not come to an end")
    assert_idle(core)
    for i, (prompt, count, _, _) in enumerate(jobs):
        expected = continuation(prompt, count)[: max(0, capacity - len(prompt))]
        assert got.get(f"r{i}", []) == expected


@settings(deadline=None, max_examples=examples(25, exploring=60))
@given(data=st.data())
def test_aborted_requests_leave_nothing_behind(data: st.DataObject) -> None:
    core, _ = make_core(num_pages=20, token_budget=16, max_running_requests=4)
    for i in range(8):
        core.add(
            request(
                f"r{i}", data.draw(prompts), data.draw(st.integers(1, 12)), arrival_time=float(i)
            )
        )
    seen: list[str] = []
    gone: set[str] = set()
    while core.has_work:
        victims = data.draw(
            st.lists(st.sampled_from([f"r{i}" for i in range(8)] + ["unknown"]), max_size=2)
        )
        gone |= set(victims)
        core.abort(victims)
        core.check()
        seen = [output.rid for output in core.step().outputs]
        assert not set(seen) & gone
    assert_idle(core)


def test_a_step_stays_within_the_token_budget() -> None:
    core, runner = make_core(token_budget=10)
    for i in range(4):
        core.add(request(f"r{i}", list(range(17 + i)), 3, arrival_time=float(i)))
    drain(core)
    assert max(runner.step_tokens) == 10


def test_decodes_go_on_while_a_long_prompt_is_computed() -> None:
    core, _ = make_core(token_budget=8)
    core.add(request("short", [1, 2], 20))
    core.step()
    core.add(request("long", [3] * 60, 1, arrival_time=1.0))
    assert all([output.rid for output in core.step().outputs] == ["short"] for _ in range(6))


def test_a_prefix_is_computed_once() -> None:
    core, runner = make_core(token_budget=64)
    prompt = [i % VOCAB for i in range(40)]
    core.add(request("first", prompt, 1))
    drain(core)
    core.add(request("second", [*prompt, 5], 1, arrival_time=1.0))
    outputs = drain(core)
    assert outputs["second"][0].cached_tokens == 40
    assert runner.step_tokens == [40, 1]


def test_requests_that_arrive_together_share_their_prefix() -> None:
    core, runner = make_core(token_budget=64)
    prompt = [i % VOCAB for i in range(40)]
    for i in range(4):
        core.add(request(f"r{i}", [*prompt, i], 1, arrival_time=float(i)))
    drain(core)
    assert sum(runner.step_tokens) == 41 + 3


def test_no_prefix_is_shared_where_that_is_off() -> None:
    core, runner = make_core(token_budget=64, share_prefixes=False)
    for i in range(2):
        core.add(request(f"r{i}", [3] * 20, 1, arrival_time=float(i)))
    drain(core)
    assert sum(runner.step_tokens) == 40
    assert core.stats().kv_tokens_cached == 0


def test_memory_of_the_cache_that_was_used_once_is_told_and_used_again() -> None:
    core, _ = make_core(page_size=4)
    assert core.stats().kv_tokens_touched == 0
    for again in range(3):
        core.add(request(f"r{again}", [again] * 20, 4))
        drain(core)
        core.flush_cache()
        assert core.stats().kv_tokens_touched == 24 and core.stats().kv_tokens_cached == 0


def test_shortage_of_pages_preempts_the_newest_and_loses_nothing() -> None:
    core, _ = make_core(num_pages=11, page_size=4)
    for i in range(3):
        core.add(request(f"r{i}", [i, i + 1, i + 2], 25, arrival_time=float(i)))
    finished: list[str] = []
    outputs: dict[str, list[int]] = {}
    while core.has_work:
        for output in core.step().outputs:
            outputs.setdefault(output.rid, []).extend(output.token_ids)
            if output.finish_reason is not None:
                finished.append(output.rid)
        core.check()
    assert core.stats().preemptions_total > 0
    assert finished == ["r0", "r1", "r2"]
    assert outputs == {f"r{i}": continuation([i, i + 1, i + 2], 25) for i in range(3)}


def test_a_higher_priority_goes_first() -> None:
    core, _ = make_core(max_running_requests=1)
    core.add(request("low", [1], 10, arrival_time=0.0))
    core.step()
    core.add(request("high", [2], 2, priority=5, arrival_time=1.0))
    outputs = [output.rid for _ in range(2) for output in core.step().outputs]
    assert outputs == ["high", "high"]
    assert tokens(drain(core)["low"]) == continuation([1], 10)[1:]


def test_a_resumed_request_goes_on_where_it_was() -> None:
    core, _ = make_core()
    whole = continuation([5, 6, 7], 12)
    core.add(request("resumed", [5, 6, 7], 12, output_ids=whole[:7]))
    assert tokens(drain(core)["resumed"]) == whole[7:]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "empty"),
        ([1, VOCAB], "outside of 0 to 100"),
        ([-1], "outside of 0 to 100"),
        ([1] * 300, "300 tokens"),
    ],
)
def test_a_request_that_cannot_run_is_answered(prompt: list[int], words: str) -> None:
    core, _ = make_core()
    core.add(request("bad", prompt, 4))
    (output,) = drain(core)["bad"]
    assert output.finish_reason is FinishReason.ERROR
    assert words in (output.error or "")


def test_a_stop_token_ends_the_request_and_comes_last() -> None:
    core, _ = make_core()
    whole = continuation([9, 8], 10)
    params = SamplingParams(
        temperature=0.0, max_new_tokens=10, ignore_eos=True, stop_token_ids=[whole[4]]
    )
    core.add(GenerateRequest(rid="r", input_ids=[9, 8], params=params))
    outputs = drain(core)["r"]
    first = whole.index(whole[4])
    assert tokens(outputs) == whole[: first + 1]
    assert (outputs[-1].finish_reason, outputs[-1].stop_token_id) == (FinishReason.STOP, whole[4])


def test_the_context_length_ends_a_request() -> None:
    core, _ = make_core(context_length=12)
    core.add(request("r", [1] * 8, 100))
    outputs = drain(core)["r"]
    assert len(tokens(outputs)) == 4
    assert outputs[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("start", [0, 1, 5, 39])
@pytest.mark.parametrize("budget", [7, 64])
def test_prompt_logprobs_cover_the_prompt_once(start: int, budget: int) -> None:
    core, _ = make_core(token_budget=budget)
    prompt = [i % VOCAB for i in range(40)]
    core.add(request("fill the prefix tree", prompt, 1))
    drain(core)
    params = SamplingParams(max_new_tokens=0, prompt_logprobs=2, prompt_logprobs_start=start)
    core.add(GenerateRequest(rid="r", input_ids=prompt, params=params))
    (output,) = drain(core)["r"]
    assert output.finish_reason is FinishReason.LENGTH
    assert output.prompt_logprobs is not None
    ids = [None if entry is None else entry.token_id for entry in output.prompt_logprobs]
    assert ids == [None, *prompt[1:]] if start == 0 else ids == prompt[start:]
    for entry in filter(None, output.prompt_logprobs):
        top = [token for token, _ in entry.top]
        assert len(top) == 2 and entry.rank is not None
        is_top = entry.token_id in top
        assert entry.rank == top.index(entry.token_id) + 1 if is_top else entry.rank > 2


@pytest.mark.parametrize("length", [1, 9])
def test_prompt_logprobs_are_not_lost_beside_decodes(length: int) -> None:
    """A chunk of one token makes the step as small as a decode, which needs no more than tokens."""
    core, _ = make_core(token_budget=3, runner_class=WholeStepToyRunner)
    for rid in ("first", "second"):
        core.add(request(rid, [ord(rid[0]) % VOCAB], 30))
    core.step()
    prompt = [i % VOCAB for i in range(length)]
    core.add(
        GenerateRequest(
            rid="r", input_ids=prompt, params=SamplingParams(max_new_tokens=0, prompt_logprobs=0)
        )
    )
    (output,) = drain(core)["r"]
    found = output.prompt_logprobs
    assert found is not None
    assert [None if entry is None else entry.token_id for entry in found] == [None, *prompt[1:]]


def test_the_likeliest_token_has_its_log_probability() -> None:
    """Where a small step might find the token alone."""
    core, _ = make_core(runner_class=WholeStepToyRunner)
    params = SamplingParams(temperature=0.0, max_new_tokens=5, ignore_eos=True, logprobs=0)
    core.add(GenerateRequest(rid="r", input_ids=[1], params=params))
    core.add(request("plain", [2], 5))
    outputs = drain(core)["r"]
    told = [each.token_id for output in outputs for each in output.logprobs or []]
    assert told == tokens(outputs) == continuation([1], 5)


def test_flushing_drops_what_no_request_uses() -> None:
    core, _ = make_core()
    core.add(request("done", [1] * 20, 1))
    drain(core)
    core.add(request("running", [2] * 20, 10))
    core.step()
    assert core.flush_cache() == 20
    core.check()
    assert tokens(drain(core)["running"]) == continuation([2] * 20, 10)[1:]


class BrokenRunner(ToyRunner):
    """Its logits are NaN where a prompt began with the token 99."""

    def forward(self, batch: Batch) -> torch.Tensor:
        hidden = super().forward(batch).double()
        row = 0
        for scheduled, num_new in batch.scheduled:
            if scheduled.tokens[0] == 99:
                hidden[row : row + num_new] = torch.nan
            row += num_new
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().compute_logits(hidden.nan_to_num(0.0).long())
        return logits.where(hidden.isfinite(), torch.nan)


@pytest.mark.parametrize("overlap", [False, True])
def test_logits_of_nan_end_their_request_alone_and_nobody_finds_what_it_computed(
    overlap: bool,
) -> None:
    core, runner = make_core(overlap=overlap, runner_class=BrokenRunner)
    core.add(request("good", [1, 2, 3], 20))
    core.add(request("bad", [99, *range(40)], 20))
    outputs = drain(core)
    assert tokens(outputs["good"]) == continuation([1, 2, 3], 20)
    (error,) = outputs["bad"]
    assert (error.finish_reason, error.token_ids) == (FinishReason.ERROR, [])
    assert "not finite" in (error.error or "")
    before = sum(runner.step_tokens)
    core.add(request("again", [99, *range(40)], 1))
    drain(core)
    assert sum(runner.step_tokens) - before >= 41, "pages of a broken request were shared"
    assert_idle(core)


def test_when_a_request_began_is_told_once_before_its_first_token() -> None:
    core, _ = make_core(num_pages=6, page_size=4, token_budget=3)
    for rid in ("a", "b"):
        core.add(request(rid, [1, 2, 3, 4, 5], 12))
    told: dict[str, float] = {}
    while core.has_work:
        step = core.step()
        assert not step.started.keys() & told.keys()
        told.update(step.started)
        assert {output.rid for output in step.outputs} <= told.keys()
    assert told["a"] <= told["b"] <= time.monotonic()
