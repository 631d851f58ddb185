"""When overlapped steps are launched, read and dropped, and what a late end costs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import pytest
import torch
from served_answers import core_of, serve
from toy_runner import EOS, VOCAB, ToyRunner, continuation, make_core

from piecework.kernels.staging import HostCopy
from piecework.runtime.core.batch import Batch
from piecework.runtime.core.generation import FinishReason, GenerateRequest
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.sampling import logits_processors
from piecework.runtime.sampling.grammar import Matcher
from piecework.runtime.sampling.logits_processors import Rows


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
        cls,
        params: SamplingParams,
        prompt: npt.NDArray[np.int64],
        stop_ids: frozenset[int],
        matcher: Matcher | None = None,
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
