"""All that requests are given by an engine core, cores over a toy model to compare it with, and
requests of all kinds.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from toy_runner import (
    VOCAB,
    HybridToyRunner,
    RecurrentToyRunner,
    ToyRunner,
    WindowedToyRunner,
    make_core,
)

from piecework.runtime.core.generation import GenerateRequest, TokenLogprob, TokenOutput
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.engine.core import EngineCore


class Answer:
    """All that a request was given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.end: tuple[object, ...] | None = None

    def add(self, output: TokenOutput) -> None:
        assert self.end is None, "an answer goes on after its end"
        self.tokens += output.token_ids
        self.logprobs += output.logprobs or []
        if output.prompt_logprobs is not None:
            self.logprobs += [entry for entry in output.prompt_logprobs if entry is not None]
        if output.finish_reason is not None:
            self.end = (output.finish_reason, output.stop_token_id, output.error)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Answer) and vars(self) == vars(other)

    def __repr__(self) -> str:
        return repr(vars(self))


class VariedRunner(ToyRunner):
    """Logits that differ for every token, and with every token before."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return ((hidden * 7919 + torch.arange(VOCAB) * 104_729) % 1009) / 250.0


class VariedRecurrentRunner(VariedRunner, RecurrentToyRunner):
    """The same of a model with a recurrent state."""


class VariedWindowedRunner(VariedRunner, WindowedToyRunner):
    """The same of a model with sliding windows."""


class VariedHybridRunner(VariedRunner, HybridToyRunner):
    """The same of a model that has both."""


def core_of(
    overlap: bool, *, state_slots: int = 0, window_pages: int = 0, **sizes: Any
) -> EngineCore:
    kind = {
        (False, False): VariedRunner,
        (True, False): VariedRecurrentRunner,
        (False, True): VariedWindowedRunner,
        (True, True): VariedHybridRunner,
    }[bool(state_slots), bool(window_pages)]
    more = {"state_slots": state_slots, "window_pages": window_pages}
    return make_core(overlap=overlap, runner_class=kind, **more, **sizes)[0]


def serve(
    core: EngineCore,
    arrivals: list[tuple[int, GenerateRequest]],
    aborts: dict[int, list[str]] | None = None,
    flushes: frozenset[int] = frozenset(),
) -> dict[str, Answer]:
    """Answers by request; requests arrive, and are aborted, before the step of their number. Pages
    are checked after each.
    """
    answers: dict[str, Answer] = {}
    gone: set[str] = set()
    for number in range(5000):
        for message in [message for step, message in arrivals if step == number]:
            core.add(message)
            answers[message.rid] = Answer()
        victims = (aborts or {}).get(number, [])
        core.abort(victims)
        gone |= answers.keys() & victims
        if number in flushes:
            core.flush_cache()
        core.check()
        if core.has_work:
            for output in core.step().outputs:
                assert output.rid not in gone or output.error is not None
                answers[output.rid].add(output)
            core.check()
        elif number > max((step for step, _ in arrivals), default=0):
            stats = core.stats()
            assert (stats.running_requests, stats.queued_requests, stats.kv_tokens_used) == (
                0,
                0,
                0,
            )
            assert core._in_flight is None
            assert all(answer.end is not None for rid, answer in answers.items() if rid not in gone)
            return answers
    raise AssertionError("the scheduler does not come to an end")


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    count = draw(st.sampled_from([0, 1, 2, 7, 20]))
    wanted: dict[str, Any] = {
        "max_new_tokens": count,
        "min_new_tokens": draw(st.integers(0, min(count, 4))),
        "temperature": draw(st.sampled_from([0.0, 0.0, 0.5, 1.5])),
        "top_k": draw(st.sampled_from([-1, -1, 3])),
        "top_p": draw(st.sampled_from([1.0, 0.7])),
        "seed": draw(st.sampled_from([None, 1, 99])),
        "ignore_eos": draw(st.booleans()),
        "stop_token_ids": draw(st.lists(st.integers(0, VOCAB - 1), max_size=12)),
        "logprobs": draw(st.sampled_from([None, None, 0, 3])),
        "prompt_logprobs": draw(st.sampled_from([None, None, 0, 2])),
        "prompt_logprobs_start": draw(st.sampled_from([0, 3])),
    }
    if draw(st.booleans()):
        wanted["repetition_penalty"] = draw(st.sampled_from([1.0, 1.7, 0.6]))
        wanted["presence_penalty"] = draw(st.sampled_from([0.0, 1.3]))
        wanted["frequency_penalty"] = draw(st.sampled_from([0.0, 0.7]))
        wanted["logit_bias"] = draw(
            st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-50.0, 2.5]), max_size=3)
        )
    return SamplingParams(**wanted)


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=40)
jobs_of_several = st.lists(
    st.tuples(prompts, sampling_params(), st.integers(0, 8), st.integers(-1, 1), st.integers(0, 3)),
    min_size=1,
    max_size=10,
)
sizes_of_all_kinds = st.fixed_dictionaries(
    {
        "num_pages": st.integers(17, 40),
        "page_size": st.sampled_from([1, 4, 16]),
        "token_budget": st.integers(1, 48),
        "max_running_requests": st.integers(1, 6),
        "share_prefixes": st.booleans(),
    }
)


def arrivals_of(
    jobs: list[tuple[list[int], SamplingParams, int, int, int]],
) -> list[tuple[int, GenerateRequest]]:
    """Some resume from tokens that were delivered before."""
    return [
        (
            delay,
            GenerateRequest(
                rid=f"r{number}",
                input_ids=prompt,
                params=params,
                output_ids=[5, 6, 7][: min(resumed, max(0, params.max_new_tokens - 1))],
                priority=priority,
                arrival_time=float(number),
            ),
        )
        for number, (prompt, params, delay, priority, resumed) in enumerate(jobs)
    ]
