"""A drafter that is never right costs less and less; one that becomes right is found again."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from sparse import sparse
from toy_runner import ToyRunner, make_core

from piecework.runtime.cache.kinds import make_cache
from piecework.runtime.core.batch import Batch
from piecework.runtime.core.generation import GenerateRequest
from piecework.runtime.core.request import Scheduled
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.engine.core import EngineCore
from piecework.runtime.executor.step import PendingStep, StepTokens
from piecework.runtime.speculative.draft_model import DraftModel
from piecework.runtime.speculative.speculation import Speculation

REQUESTS = 8


class Clock:
    """A clock that steps alone advance, so that decisions do not depend on the machine."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedStep(PendingStep):
    """A step of a device that computes one step after another, beside the host."""

    def __init__(
        self, model: Timed, scheduled: list[Scheduled], previous: PendingStep | None
    ) -> None:
        super().__init__(model, scheduled, previous)
        self.clock = model.clock
        began = max(self.clock.now, model.done)
        self.done = model.done = began + (model.step + model.row * self.num_tokens) / 1000

    def read(self) -> list[StepTokens]:
        self.clock.now = max(self.clock.now, self.done)
        return super().read()


class Timed(ToyRunner):
    """A model whose steps take a fixed time, in milliseconds: for a step, and for each row."""

    clock: Clock
    step, row, done = 10.0, 0.5, 0.0

    def execute(self, scheduled: list[Scheduled], previous: PendingStep | None) -> PendingStep:
        return TimedStep(self, scheduled, previous)

    def forward(self, batch: Batch) -> torch.Tensor:
        self.step_tokens.append(batch.num_tokens)
        # The last token and its position make the next one, so that long texts take no time.
        return (batch.input_ids * 31 + batch.positions * 17)[:, None]


class Drafting(Timed):
    """Is always wrong until it is told the truth."""

    step, row = 1.0, 0.05
    is_right = False

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        return super().compute_logits(hidden + (not self.is_right))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def _core(clock: Clock, *, overlap: bool, drafts: bool) -> tuple[EngineCore, Drafting]:
    runner = Drafting(9000, 4)
    runner.clock = clock
    drafter = DraftModel(runner, make_cache(9000, 4, share_prefixes=True), steps=5, vocab_size=101)
    core, target = make_core(
        num_pages=9000,
        runner_class=Timed,
        overlap=overlap,
        speculation=Speculation([], most=8, max_rows=64, drafter=drafter) if drafts else None,
    )
    target.clock = clock  # type: ignore[attr-defined]
    for number in range(REQUESTS):
        core.add(
            GenerateRequest(
                rid=str(number),
                input_ids=[number, *range(12)],
                params=SamplingParams(temperature=0.0, max_new_tokens=4000, ignore_eos=True),
            )
        )
    return core, runner


def _run(core: EngineCore, steps: int) -> dict[str, Any]:
    before, tokens = core.stats(), 0
    for _ in range(steps):
        tokens += sum(len(output.token_ids) for output in core.step().outputs)
    stats = core.stats()
    names = ("draft_tokens_total", "accepted_tokens_total")
    counts = {name: getattr(stats, name) - getattr(before, name) for name in names}
    return counts | {"tokens": tokens}


@pytest.mark.parametrize("overlap", sparse([False, True], kept=[True]), ids=["alone", "overlapped"])
def test_drafts_that_are_never_right_cost_less_and_less(clock: Clock, overlap: bool) -> None:
    core, runner = _core(clock, overlap=overlap, drafts=True)
    first = _run(core, 40)
    assert 0 < first["draft_tokens_total"] < 40, first
    # One request computed its prompt for the drafts, not all.
    assert sum(runner.step_tokens) < 100
    then = _run(core, 600)
    assert 0 < then["draft_tokens_total"] < 40, then
    last = _run(core, 600)
    assert last["draft_tokens_total"] <= 8, last
    seconds = clock.now
    clock.now = 0.0
    _run(_core(clock, overlap=overlap, drafts=False)[0], 1240)
    assert 1.0 <= seconds / clock.now < 1.01


@pytest.mark.parametrize("overlap", sparse([False, True], kept=[True]), ids=["alone", "overlapped"])
def test_drafts_that_become_right_are_used_again(clock: Clock, overlap: bool) -> None:
    core, runner = _core(clock, overlap=overlap, drafts=True)
    _run(core, 300)
    runner.is_right = True
    _run(core, 500)
    found = _run(core, 50)
    assert found["tokens"] > 3 * 50 * REQUESTS
    assert found["accepted_tokens_total"] == found["draft_tokens_total"]
