"""Overlapped steps: the same tokens as without, whatever the requests ask for, and nothing waits
that need not.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import make_tiny_model
from toy_runner import EOS, VOCAB, ToyRunner, continuation, make_core

from piecework.kernels.cpu.platform import CpuPlatform
from piecework.kernels.staging import HostCopy
from piecework.runtime.engine.core import EngineCore
from piecework.runtime.engine.messages import (
    FinishReason,
    GenerateRequest,
    TokenLogprob,
    TokenOutput,
)
from piecework.runtime.executor.batch import Batch
from piecework.runtime.llm import LLM
from piecework.runtime.sampling import logits_processors
from piecework.runtime.sampling.logits_processors import Rows
from piecework.runtime.sampling.params import SamplingParams


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


def core_of(overlap: bool, **sizes: Any) -> EngineCore:
    core, _ = make_core(overlap=overlap, **sizes)
    core._runner = VariedRunner(sizes["num_pages"], sizes["page_size"])
    return core


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


@settings(deadline=None, max_examples=250)
@given(jobs=jobs_of_several, sizes=sizes_of_all_kinds)
def test_answers_are_those_of_steps_one_after_another(
    jobs: list[Any], sizes: dict[str, Any]
) -> None:
    arrivals = arrivals_of(jobs)
    assert serve(core_of(True, **sizes), arrivals) == serve(core_of(False, **sizes), arrivals)


@settings(deadline=None, max_examples=120)
@given(
    jobs=jobs_of_several,
    sizes=sizes_of_all_kinds,
    aborts=st.dictionaries(
        st.integers(0, 25), st.lists(st.integers(0, 9).map("r{}".format), max_size=3), max_size=6
    ),
    flushes=st.frozensets(st.integers(0, 25), max_size=4),
)
def test_aborts_at_any_moment_change_no_other_answer(
    jobs: list[Any], sizes: dict[str, Any], aborts: dict[int, list[str]], flushes: frozenset[int]
) -> None:
    arrivals = arrivals_of(jobs)
    whole = serve(core_of(False, **sizes), arrivals)
    answers = serve(core_of(True, **sizes), arrivals, aborts, flushes)
    for rid, answer in answers.items():
        if answer.end is not None:
            assert answer == whole[rid]
        else:
            assert answer.tokens == whole[rid].tokens[: len(answer.tokens)]


@settings(deadline=None, max_examples=40)
@given(sizes=sizes_of_all_kinds, params=sampling_params(), count=st.integers(2, 5))
def test_samples_of_one_prompt(sizes: dict[str, Any], params: SamplingParams, count: int) -> None:
    arrivals = [
        (
            0,
            GenerateRequest(
                rid=f"r{n}", input_ids=[1, 2, 1, 2, 0] * 3, params=params, arrival_time=float(n)
            ),
        )
        for n in range(count)
    ]
    assert serve(core_of(True, **sizes), arrivals) == serve(core_of(False, **sizes), arrivals)


def greedy(rid: str, prompt: list[int], count: int, **kwargs: Any) -> GenerateRequest:
    stop, later = kwargs.pop("stop", []), kwargs.pop("arrival_time", 0.0)
    params = SamplingParams(
        temperature=0.0, max_new_tokens=count, ignore_eos=True, stop_token_ids=stop, **kwargs
    )
    return GenerateRequest(rid=rid, input_ids=prompt, params=params, arrival_time=later)


def test_a_step_is_launched_before_the_one_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []
    forward, wait = ToyRunner.forward, HostCopy.wait

    def launched(runner: ToyRunner, batch: Batch) -> torch.Tensor:
        events.append("launch")
        return forward(runner, batch)

    def read(copy: HostCopy) -> list[torch.Tensor]:
        events.append("read")
        return wait(copy)

    monkeypatch.setattr(ToyRunner, "forward", launched)
    monkeypatch.setattr(HostCopy, "wait", read)
    core, _ = make_core(overlap=True)
    core.add(greedy("r", [1, 2, 3], 4))
    delivered = []
    while core.has_work:
        delivered.append([output.token_ids for output in core.step().outputs])
    assert events == ["launch", "launch", "read", "launch", "read", "launch", "read", "read"]
    assert delivered == [[], *([[token]] for token in continuation([1, 2, 3], 4))]
    stats = core.stats()
    assert (stats.steps_total, stats.overlapped_steps_total, stats.discarded_tokens_total) == (
        4,
        3,
        0,
    )


def test_a_stop_token_is_found_one_step_late_and_nothing_of_that_step_is_delivered() -> None:
    core, runner = make_core(overlap=True)
    whole = continuation([9, 8], 10)
    first = whole.index(whole[4])
    (answer,) = serve(core, [(0, greedy("r", [9, 8], 10, stop=[whole[4]]))]).values()
    assert answer.tokens == whole[: first + 1] and answer.end == (FinishReason.STOP, whole[4], None)
    assert len(runner.step_tokens) == first + 2
    stats = core.stats()
    assert (stats.generation_tokens_total, stats.discarded_tokens_total) == (first + 1, 1)


def test_an_end_by_length_is_foreseen() -> None:
    """No step is spent on a request whose last token is in flight, be it its only one."""
    for count in (0, 1, 5):
        core, runner = make_core(overlap=True)
        serve(core, [(0, greedy("r", [1] * 8, count))])
        assert runner.step_tokens == [8] + [1] * max(0, count - 1)


def test_pages_of_a_request_that_stopped_serve_another_while_its_last_step_is_in_flight() -> None:
    """Each request fills the whole cache but for the page of the other's first tokens."""
    core, _ = make_core(num_pages=6, page_size=4, overlap=True, share_prefixes=False)
    whole = continuation([3] * 9, 6)
    stop = next(token for token in whole if token not in whole[: whole.index(token)])
    arrivals = [
        (0, greedy("first", [3] * 9, 6, stop=[stop])),
        (1, greedy("second", [4] * 15, 4, arrival_time=1.0)),
    ]
    answers = serve(core, arrivals)
    assert answers["first"].tokens == whole[: whole.index(stop) + 1]
    assert answers["second"].tokens == continuation([4] * 15, 4)


def test_nobody_gives_way_before_the_step_in_flight_is_read() -> None:
    """Where pages run out, an end that is in flight is waited for, rather than that a request
    starts over.
    """
    core, _ = make_core(num_pages=7, page_size=4, overlap=True, share_prefixes=False)
    # The first takes the last free page for its last token; while that is in flight the second
    # needs one too.
    arrivals = [
        (0, greedy("ends", [1] * 8, 2)),
        (0, greedy("goes on", [2] * 11, 6, arrival_time=1.0)),
    ]
    answers = serve(core, arrivals)
    assert answers["ends"].tokens == continuation([1] * 8, 2) and answers[
        "goes on"
    ].tokens == continuation([2] * 11, 6)
    assert core.stats().preemptions_total == 0


def test_preempted_requests_lose_nothing() -> None:
    core, _ = make_core(num_pages=11, page_size=4, overlap=True)
    answers = serve(
        core,
        [(0, greedy(f"r{i}", [i, i + 1, i + 2], 25, arrival_time=float(i))) for i in range(3)],
    )
    assert core.stats().preemptions_total > 0
    assert {rid: answer.tokens for rid, answer in answers.items()} == {
        f"r{i}": continuation([i, i + 1, i + 2], 25) for i in range(3)
    }


def test_a_step_that_nobody_waits_for_is_dropped() -> None:
    core, _ = make_core(overlap=True)
    core.add(greedy("r", [1, 2], 9))
    core.step()
    core.step()
    core.abort(["r"])
    assert not core.has_work and core.stats().discarded_tokens_total == 1
    core.check()
    assert core.flush_cache() == 0 or core.stats().kv_tokens_cached == 0


@pytest.mark.parametrize("count", [0, 5])
def test_a_request_that_is_aborted_in_flight_is_given_nothing(count: int) -> None:
    """Neither its token nor, where it wanted none, the end of its prompt; the other's answer is
    whole.
    """
    core, _ = make_core(overlap=True)
    core.add(greedy("gone", [1, 2], count))
    core.add(greedy("other", [3, 4], 5, arrival_time=1.0))
    assert core.step().outputs == []
    core.abort(["gone"])
    core.check()
    outputs = [output for _ in range(6) if core.has_work for output in core.step().outputs]
    assert [(output.rid, *output.token_ids) for output in outputs] == [
        ("other", token) for token in continuation([3, 4], 5)
    ]


def test_the_end_of_sequence_token_ends_it_too() -> None:
    prompt = next(
        [a, b] for a in range(VOCAB) for b in range(VOCAB) if EOS in continuation([a, b], 6)[1:5]
    )
    whole = continuation(prompt, 6)
    core, _ = make_core(overlap=True)
    params = SamplingParams(temperature=0.0, max_new_tokens=6)
    (answer,) = serve(
        core, [(0, GenerateRequest(rid="r", input_ids=prompt, params=params))]
    ).values()
    assert answer.tokens == whole[: whole.index(EOS) + 1] and answer.end == (
        FinishReason.STOP,
        EOS,
        None,
    )


class NeverTheSameTwice:
    """Bans the last token, which it looks for on the host."""

    needs_last_token: ClassVar[bool] = True

    @classmethod
    def wanted(
        cls, params: SamplingParams, prompt: npt.NDArray[np.int64], stop_ids: frozenset[int]
    ) -> Self | None:
        return cls() if params.seed == 77 else None

    @classmethod
    def apply(
        cls,
        logits: torch.Tensor,
        rows: Rows[Self],
        sampled: torch.Tensor | None,
    ) -> None:
        for row, _, request in rows:
            assert not request.num_placeholders
            if request.num_output:
                logits[row, int(request.output_tokens[-1])] = -1e9


def test_only_a_request_whose_processor_must_know_the_last_token_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        logits_processors, "PROCESSORS", (*logits_processors.PROCESSORS, NeverTheSameTwice)
    )
    sizes = {"num_pages": 40, "page_size": 4}
    arrivals = [
        (0, greedy("waits", [1, 2], 8, seed=77, logit_bias={5: 9.0})),
        (0, greedy("goes on", [3, 4], 8, arrival_time=1.0)),
    ]
    core = core_of(True, **sizes)
    answers = serve(core, arrivals)
    assert answers == serve(core_of(False, **sizes), arrivals)
    said = answers["waits"].tokens
    assert len(set(said)) > 1 and all(a != b for a, b in pairwise(said))
    # In eight steps one gets all of its tokens and the other half of its own, the rest of which it
    # gets alone: one in each of four steps.
    stats = core.stats()
    assert (stats.steps_total, stats.overlapped_steps_total) == (12, 8)


def test_a_model_gives_the_same_text(tmp_path: Path) -> None:
    """Greedy, sampled, penalised and stopped sequences of a real engine."""
    path = make_tiny_model(tmp_path / "model")
    prompts = [
        [(17 * i + 3 * j) % 400 for j in range(length)]
        for i, length in enumerate([3, 40, 9, 90, 14, 3, 61, 5])
    ]
    params = [
        SamplingParams(
            temperature=0.9 * (i % 2),
            top_p=[1.0, 0.8][i // 4],
            top_k=[-1, 20][i % 2],
            seed=i,
            max_new_tokens=6 + i,
            frequency_penalty=0.5 * (i % 3),
            logprobs=2,
            prompt_logprobs=None if i % 2 else 1,
        )
        for i in range(len(prompts))
    ]
    shared: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "max_total_tokens": 320,
        "chunked_prefill_size": 48,
        "num_threads": 1,
    }
    one_by_one, overlapped = (
        LLM(str(path), disable_overlap_schedule=disabled, **shared) for disabled in (True, False)
    )
    assert (one_by_one.info.overlap_schedule, overlapped.info.overlap_schedule) == (False, True)
    for ours, expected in zip(
        overlapped.generate(prompts, params), one_by_one.generate(prompts, params), strict=True
    ):
        assert ours.token_ids == expected.token_ids and ours.finish_reason == expected.finish_reason
        assert [e.logprob for e in ours.logprobs] == pytest.approx(
            [e.logprob for e in expected.logprobs], abs=1e-4
        )
    assert (
        overlapped.core.stats().overlapped_steps_total
        > 0
        == one_by_one.core.stats().overlapped_steps_total
    )
    overlapped.core.check()
    assert not overlapped.core.has_work


def test_on_a_cpu_steps_do_not_overlap_unless_asked_to(tmp_path: Path) -> None:
    """There the host is the device: what is launched is done."""
    assert not CpuPlatform.runs_beside_host
    llm = LLM(
        str(make_tiny_model(tmp_path / "model")),
        dtype="float32",
        device="cpu",
        max_total_tokens=256,
        num_threads=1,
    )
    assert not llm.info.overlap_schedule


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
@pytest.mark.parametrize(
    "graphs", [{"disable_cuda_graph": True}, {"cuda_graph_backend_decode": "full"}], ids=str
)
def test_a_launch_never_waits_for_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graphs: dict[str, Any]
) -> None:
    path = make_tiny_model(tmp_path / "model")
    shared: dict[str, Any] = {
        "dtype": "float32",
        "device": "cuda",
        "max_total_tokens": 4096,
        "max_running_requests": 8,
        **graphs,
    }
    prompts = [
        [(17 * i + 3 * j) % 400 for j in range(length)] for i, length in enumerate([3, 40, 9, 90])
    ]
    params = SamplingParams(
        temperature=0.0, max_new_tokens=12, ignore_eos=True, frequency_penalty=0.5, logprobs=2
    )
    one_by_one, overlapped = (
        LLM(str(path), disable_overlap_schedule=disabled, **shared) for disabled in (True, None)
    )
    expected = one_by_one.generate(prompts, params)
    # Kernels are compiled and memory is found at the first steps.
    overlapped.generate(prompts, params)
    launch = EngineCore._launch

    def checked(*arguments: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(EngineCore, "_launch", checked)
    ours = overlapped.generate(prompts, params)
    assert [one.token_ids for one in ours] == [one.token_ids for one in expected]
    assert overlapped.core.stats().overlapped_steps_total > 0
