"""Steps that give a request several tokens, as speculation does: the same answers."""

from __future__ import annotations

from typing import Any

import numpy as np
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_runner import VOCAB, ToyRunner, assert_idle, continuation, digest, drain, make_core, tokens

from piecework.runtime.core.generation import FinishReason, GenerateRequest
from piecework.runtime.core.request import Scheduled
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.executor.step import PendingStep, StepTokens


class TwoTokenStep(PendingStep):
    """Gives two tokens at once, as speculation does."""

    def read(self) -> list[StepTokens]:
        return [
            result._replace(
                tokens=[*result.tokens, following(result.request.tokens, result.tokens[0])],
                logprobs=None if result.logprobs is None else result.logprobs * 2,
            )
            if result.tokens
            else result
            for result in super().read()
        ]


def following(known: np.ndarray, token: int) -> int:
    return digest(np.append(known, token)) % VOCAB


class TwoTokenRunner(ToyRunner):
    def execute(self, scheduled: list[Scheduled], previous: PendingStep | None) -> PendingStep:
        assert previous is None
        return TwoTokenStep(self, scheduled, previous)


@settings(deadline=None, max_examples=examples(60, exploring=120))
@given(
    jobs=st.lists(
        st.tuples(
            st.lists(st.integers(0, 2), min_size=1, max_size=40),
            st.integers(0, 20),
            st.integers(-1, 1),
            st.none() | st.integers(0, 12),
        ),
        min_size=1,
        max_size=8,
    ),
    sizes=st.fixed_dictionaries(
        {
            "num_pages": st.integers(17, 40),
            "page_size": st.sampled_from([1, 4, 16]),
            "token_budget": st.integers(1, 48),
            "max_running_requests": st.integers(1, 6),
            "share_prefixes": st.booleans(),
        }
    ),
)
def test_steps_of_several_tokens_give_the_same_answers(
    jobs: list[tuple[list[int], int, int, int | None]], sizes: dict[str, Any]
) -> None:
    """A stop token cuts what its step gave, also in the middle, and so does the length."""
    core, _ = make_core(runner_class=TwoTokenRunner, **sizes)
    wanted: dict[str, tuple[list[int], FinishReason, int | None]] = {}
    room = (sizes["num_pages"] - 1) * sizes["page_size"]
    for number, (prompt, count, priority, stop_at) in enumerate(jobs):
        whole = continuation(prompt, count)[: max(0, room - len(prompt))]
        stop = whole[stop_at] if stop_at is not None and stop_at < len(whole) else None
        params = SamplingParams(
            temperature=0.0,
            max_new_tokens=count,
            ignore_eos=True,
            stop_token_ids=[] if stop is None else [stop],
            logprobs=0,
        )
        core.add(
            GenerateRequest(
                rid=f"r{number}",
                input_ids=prompt,
                params=params,
                priority=priority,
                arrival_time=float(number),
            )
        )
        if len(prompt) > room - (count > 0):
            wanted[f"r{number}"] = ([], FinishReason.ERROR, None)
        elif stop is not None:
            wanted[f"r{number}"] = (whole[: whole.index(stop) + 1], FinishReason.STOP, stop)
        else:
            wanted[f"r{number}"] = (whole, FinishReason.LENGTH, None)
    outputs = drain(core)
    assert {
        rid: (tokens(parts), parts[-1].finish_reason, parts[-1].stop_token_id)
        for rid, parts in outputs.items()
    } == wanted
    for parts in outputs.values():
        for part in parts:
            assert len(part.logprobs or []) == len(part.token_ids) <= 2
    assert_idle(core)
    stats = core.stats()
    assert stats.generation_tokens_total == sum(len(whole) for whole, _, _ in wanted.values())


def test_a_step_of_several_tokens_counts_what_it_cuts_off() -> None:
    core, runner = make_core(runner_class=TwoTokenRunner)
    whole = continuation([9, 8], 10)
    assert whole[2] not in whole[:2]
    params = SamplingParams(
        temperature=0.0, max_new_tokens=10, ignore_eos=True, stop_token_ids=[whole[2]]
    )
    core.add(GenerateRequest(rid="r", input_ids=[9, 8], params=params))
    assert [output.token_ids for output in drain(core)["r"]] == [whole[:2], whole[2:3]]
    assert runner.step_tokens == [2, 2]
    assert core.stats().discarded_tokens_total == 1
