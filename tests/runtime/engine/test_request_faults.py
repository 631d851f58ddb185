"""What goes wrong in the engine for one request ends that request; the others get their tokens, and
no page is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_runner import ToyRunner, continuation, make_core

from piecework.runtime.core.batch import Layout
from piecework.runtime.core.generation import FinishReason, GenerateRequest, TokenOutput
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.engine.core import EngineCore
from piecework.runtime.executor import step as launch
from piecework.runtime.executor.step import PendingStep

BAD = "bad"
PLACES = ["batch", "forward", "sampling", "reading", "output"]
Guilty = Callable[[list[Any]], bool]


def request(rid: str, prompt: list[int], count: int) -> GenerateRequest:
    return GenerateRequest(
        rid=rid,
        input_ids=prompt,
        params=SamplingParams(temperature=0.0, max_new_tokens=count, ignore_eos=True),
    )


def seed(place: str, guilty: Guilty, patch: pytest.MonkeyPatch) -> None:
    """Raise at this place whenever the requests there are guilty."""

    def failing(plain: Any, requests_of: Callable[..., list[Any]]) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            if guilty(requests_of(*arguments)):
                raise IndexError("out of range")
            return plain(*arguments, **named)

        return call

    match place:
        case "batch":
            patch.setattr(
                Layout,
                "batch",
                failing(
                    Layout.batch, lambda _, scheduled, *__: [entry.request for entry in scheduled]
                ),
            )
        case "forward":
            requests_of = lambda runner, batch: [entry.request for entry in batch.scheduled]  # noqa: E731
            patch.setattr(ToyRunner, "forward", failing(ToyRunner.forward, requests_of))
        case "sampling":
            patch.setattr(
                launch, "sample", failing(launch.sample, lambda logits, requests, *_: requests)
            )
        case "reading":
            requests_of = lambda step: [entry.request for entry in step.scheduled]  # noqa: E731
            patch.setattr(PendingStep, "read", failing(PendingStep.read, requests_of))
        case "output":
            patch.setattr(
                EngineCore,
                "_output",
                failing(EngineCore._output, lambda core, result: [result.request]),
            )


def serve(
    core: EngineCore, requests: list[GenerateRequest], apart: int = 0
) -> dict[str, list[TokenOutput]]:
    """The outputs of each; a request comes every `apart` steps. Pages are checked after every
    step.
    """
    outputs: dict[str, list[TokenOutput]] = {message.rid: [] for message in requests}
    waiting = list(requests)
    for step in range(5000):
        while waiting and step >= apart * (len(requests) - len(waiting)):
            core.add(waiting.pop(0))
        if not waiting and not core.has_work:
            return outputs
        for output in core.step().outputs:
            outputs[output.rid].append(output)
        core.check()
    raise AssertionError("it does not end")


def tokens(outputs: list[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


@settings(deadline=None, max_examples=examples(50, exploring=100))
@given(
    place=st.sampled_from(PLACES),
    overlap=st.booleans(),
    share=st.booleans(),
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), min_size=1, max_size=6),
    good_tokens=st.integers(0, 5),
    budget=st.integers(4, 40),
    apart=st.integers(0, 3),
)
def test_a_fault_of_one_request_ends_it_and_no_other(
    place: str,
    overlap: bool,
    share: bool,
    prompts: list[list[int]],
    good_tokens: int,
    budget: int,
    apart: int,
) -> None:
    """Wherever it strikes, at its first token or later, and however requests come."""
    core, _ = make_core(num_pages=60, token_budget=budget, share_prefixes=share, overlap=overlap)
    requests = [request(f"r{index}", prompt, 8) for index, prompt in enumerate(prompts)]
    requests.insert(len(requests) // 2, request(BAD, [0, 1, 2], 8))
    with pytest.MonkeyPatch.context() as patch:
        seed(
            place,
            lambda found: any(each.rid == BAD and each.num_output >= good_tokens for each in found),
            patch,
        )
        outputs = serve(core, requests, apart)
    bad = outputs.pop(BAD)
    assert bad[-1].finish_reason is FinishReason.ERROR and "IndexError" in (bad[-1].error or "")
    whole = continuation([0, 1, 2], 8)
    assert tokens(bad) == whole[: len(tokens(bad))]
    for index, prompt in enumerate(prompts):
        assert tokens(outputs[f"r{index}"]) == continuation(prompt, 8)
    stats = core.stats()
    assert (stats.running_requests, stats.queued_requests, stats.kv_tokens_used) == (0, 0, 0)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("place", PLACES[:-1])
def test_a_fault_that_only_a_crowd_meets_ends_nobody(
    place: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed(place, lambda found: len(found) > 2, monkeypatch)
    core, _ = make_core(overlap=overlap)
    prompts = [[index, 1, 2] for index in range(5)]
    outputs = serve(core, [request(f"r{index}", prompt, 6) for index, prompt in enumerate(prompts)])
    assert [tokens(outputs[f"r{index}"]) for index in range(5)] == [
        continuation(prompt, 6) for prompt in prompts
    ]


def test_what_a_broken_device_raises_is_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends, and the next one has a device that works."""

    def broken(self: ToyRunner) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    seed("forward", lambda found: True, monkeypatch)
    monkeypatch.setattr(ToyRunner, "synchronize", broken)
    core, _ = make_core()
    core.add(request("r", [1, 2], 4))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        core.step()


def test_a_request_that_cannot_be_taken_is_answered() -> None:
    core, _ = make_core()
    params = SamplingParams(temperature=0.0, max_new_tokens=4, ignore_eos=True)
    broken = GenerateRequest(rid=BAD, input_ids=[1, "2"], params=params)  # type: ignore[list-item]
    outputs = serve(core, [broken, request("r", [1, 2], 4)])
    assert outputs[BAD][-1].finish_reason is FinishReason.ERROR
    assert tokens(outputs["r"]) == continuation([1, 2], 4)


@pytest.mark.parametrize("aborted", [False, True])
def test_a_request_that_ends_in_quarantine_is_let_go(
    aborted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although no step follows."""
    seed("forward", lambda found: len(found) > 1 or found[0].rid == BAD, monkeypatch)
    core, _ = make_core()
    requests = [request("r", [1, 2], 4), request(BAD, [3, 4], 4)]
    if aborted:
        for each in requests:
            core.add(each)
        core.step()
        assert len(core._quarantine) == 2
        core.abort(["r", BAD])
    else:
        outputs = serve(core, requests)
        assert outputs[BAD][-1].finish_reason is FinishReason.ERROR
    assert not core.has_work and not core._quarantine and not core._computing
