"""Speculation changes no answer, whatever is proposed."""

from __future__ import annotations

import random
from typing import Any

from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_runner import (
    ToyRunner,
    WholeStepToyRunner,
    WindowedToyRunner,
    assert_idle,
    drain,
    make_core,
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


@settings(deadline=None, max_examples=examples(60, exploring=400))
@given(
    jobs=st.lists(
        st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=40), params, st.integers(-1, 1)),
        min_size=1,
        max_size=8,
    ),
    wrong=st.sampled_from([0.0, 0.2, 0.7]),
    runner=st.sampled_from([ToyRunner, WholeStepToyRunner, WindowedToyRunner]),
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
)
def test_proposals_change_no_answer(
    jobs: list[tuple[list[int], SamplingParams, int]],
    wrong: float,
    runner: type[ToyRunner],
    sizes: dict[str, Any],
) -> None:
    requests = [
        GenerateRequest(rid=str(number), input_ids=prompt, params=each, priority=priority)
        for number, (prompt, each, priority) in enumerate(jobs)
    ]
    if runner is WindowedToyRunner:
        sizes["window_pages"] = 40
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
