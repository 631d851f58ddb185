"""Speculation changes no answer, whatever is proposed."""

from __future__ import annotations

import random
from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from served_answers import arrivals_of, core_of, jobs_of_several, serve, sizes_of_all_kinds
from toy_runner import (
    HybridToyRunner,
    RecurrentToyRunner,
    ToyRunner,
    WholeStepToyRunner,
    WindowedToyRunner,
    assert_idle,
    continuation,
    drain,
    make_core,
    tokens,
)

from piecework.runtime.core.generation import GenerateRequest, TokenOutput
from piecework.runtime.core.request import Request
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.speculative.method import Guess
from piecework.runtime.speculative.speculation import Speculation


class Recorded:
    """Proposes the answers of an earlier run, with wrong tokens among them."""

    name = "recorded"

    def __init__(self, answers: dict[str, list[int]], wrong: float) -> None:
        self.answers, self.wrong = answers, wrong

    def begin(self, request: Request) -> RecordedAnswer:
        return RecordedAnswer(self, request)

    def end(self, request: Request) -> None:
        pass


class RecordedAnswer:
    def __init__(self, method: Recorded, request: Request) -> None:
        self.method, self.request = method, request
        self.random = random.Random(request.rid)

    def append(self, tokens: list[int]) -> None:
        pass

    def guess(self, most: int) -> Guess | None:
        rest = self.method.answers[self.request.rid][self.request.num_output :][:most]
        tokens = [
            (token + 1) % 101 if self.random.random() < self.method.wrong else token
            for token in rest
        ]
        return Guess(tokens, "any 3") if tokens else None


params = st.builds(
    lambda count, least, **others: SamplingParams(
        max_new_tokens=count, min_new_tokens=min(count, least), **others
    ),
    count=st.integers(0, 30),
    least=st.integers(0, 4),
    temperature=st.sampled_from([0.0, 0.7, 2.0]),
    top_k=st.sampled_from([-1, 3]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 1.0]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    logit_bias=st.sampled_from([{}, {3: 4.0, 7: -5.0}]),
    seed=st.integers(0, 5),
    logprobs=st.sampled_from([None, 0, 3]),
    prompt_logprobs=st.sampled_from([None, None, 0]),
    stop_token_ids=st.lists(st.integers(0, 100), max_size=2),
    ignore_eos=st.booleans(),
)


@settings(deadline=None, max_examples=examples(20, exploring=400))
@given(
    jobs=st.lists(
        st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=40), params, st.integers(-1, 1)),
        min_size=1,
        max_size=8,
    ),
    wrong=st.sampled_from([0.0, 0.2, 0.7]),
    runner=st.sampled_from(
        [ToyRunner, WholeStepToyRunner, WindowedToyRunner, RecurrentToyRunner, HybridToyRunner]
    ),
    sizes=st.fixed_dictionaries(
        {
            "num_pages": st.integers(17, 40),
            "page_size": st.sampled_from([1, 4, 16]),
            "token_budget": st.integers(1, 48),
            "max_running_requests": st.integers(1, 6),
            "share_prefixes": st.booleans(),
            "overlap": st.booleans(),
        }
    ),
    state_slots=st.integers(2, 9),
)
def test_proposals_change_no_answer(
    jobs: list[tuple[list[int], SamplingParams, int]],
    wrong: float,
    runner: type[ToyRunner],
    sizes: dict[str, Any],
    state_slots: int,
) -> None:
    requests = [
        GenerateRequest(rid=str(number), input_ids=prompt, params=each, priority=priority)
        for number, (prompt, each, priority) in enumerate(jobs)
    ]
    if issubclass(runner, WindowedToyRunner):
        sizes["window_pages"] = 40
    if issubclass(runner, RecurrentToyRunner):
        # Two are too few for all requests to have guesses.
        sizes["state_slots"] = max(sizes["max_running_requests"] + 1, state_slots)
    plain = _answers(requests, runner_class=runner, **sizes)
    recorded = {
        rid: [token for output in outputs for token in output.token_ids]
        for rid, outputs in plain.items()
    }
    speculation = Speculation([Recorded(recorded, wrong)], most=8, max_rows=24)
    fast = _answers(requests, runner_class=runner, speculation=speculation, **sizes)
    assert {rid: _whole(outputs) for rid, outputs in fast.items()} == {
        rid: _whole(outputs) for rid, outputs in plain.items()
    }


@settings(deadline=None, max_examples=examples(15, exploring=400))
@given(
    jobs=jobs_of_several,
    sizes=sizes_of_all_kinds,
    aborts=st.dictionaries(
        st.integers(0, 25), st.lists(st.integers(0, 9).map("r{}".format), max_size=3), max_size=4
    ),
    flushes=st.frozensets(st.integers(0, 25), max_size=3),
    wrong=st.sampled_from([0.0, 0.2, 0.7]),
    kinds=st.sampled_from([{}, {"state_slots": 9}, {"state_slots": 9, "window_pages": 40}]),
    overlap=st.booleans(),
)
def test_requests_that_come_go_and_resume_get_the_same_answers(
    jobs: list[Any],
    sizes: dict[str, Any],
    aborts: dict[int, list[str]],
    flushes: frozenset[int],
    wrong: float,
    kinds: dict[str, int],
    overlap: bool,
) -> None:
    arrivals = arrivals_of(jobs)
    whole = serve(core_of(False, **sizes), arrivals)
    recorded = {each.rid: [*each.output_ids, *whole[each.rid].tokens] for _, each in arrivals}
    speculation = Speculation([Recorded(recorded, wrong)], most=8, max_rows=24)
    core = core_of(overlap, **sizes, **kinds, speculation=speculation)
    for rid, answer in serve(core, arrivals, aborts, flushes).items():
        assert answer.tokens == whole[rid].tokens[: len(answer.tokens)]
        assert answer.end is None or answer.end == whole[rid].end


def test_the_next_turn_continues_the_state_after_an_answer_of_proposals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt = list(range(10))
    answer = continuation(prompt, 40)
    speculation = Speculation([Recorded({"0": answer, "1": []}, 0.0)], most=8, max_rows=24)
    # Times of a busy machine would say that proposals do not pay.
    monkeypatch.setattr(speculation.costs, "read", lambda step: None)
    core, _ = make_core(runner_class=RecurrentToyRunner, state_slots=9, speculation=speculation)
    params = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True)
    core.add(GenerateRequest(rid="0", input_ids=prompt, params=params))
    assert tokens(drain(core)["0"]) == answer
    assert core.stats().steps_total < 25 and core.stats().accepted_tokens_total > 15
    core.add(GenerateRequest(rid="1", input_ids=[*prompt, *answer, 7, 7], params=params))
    outputs = drain(core)["1"]
    assert tokens(outputs) == continuation([*prompt, *answer, 7, 7], 40)
    assert outputs[0].cached_tokens >= 44, "the last page that was computed without guesses"


def _answers(requests: list[GenerateRequest], **settings: Any) -> dict[str, list[TokenOutput]]:
    core, _ = make_core(**settings)
    for request in requests:
        core.add(request)
    outputs = drain(core)
    assert_idle(core)
    return outputs


def _whole(outputs: list[TokenOutput]) -> Any:
    return (
        [token for output in outputs for token in output.token_ids],
        [each for output in outputs for each in output.logprobs or []],
        outputs[-1].prompt_logprobs,
        outputs[-1].finish_reason,
        outputs[-1].stop_token_id,
        outputs[-1].error,
    )
