"""Ranks in lockstep: what rank 0 is asked every rank does, with the same plans and the same tokens,
and one that does something else is found before it computes.
"""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_ranks import ThreadRanks, on_ranks, thread_ranks
from toy_runner import ToyRunner, assert_idle, continuation, make_core, tokens

from piecework.kernels.collectives import Group
from piecework.runtime.core.generation import GenerateRequest, TokenOutput
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.distributed.ranks import Diverged, EngineEnded
from piecework.runtime.engine.build import Engine
from piecework.runtime.engine.core import EngineCore
from piecework.runtime.engine.prompt_pace import PromptPace
from piecework.runtime.engine.rank_process import follow
from piecework.runtime.engine.text import TextEngine


class RankRunner(ToyRunner):
    """Logits are rank 0's alone; the others get its tokens."""

    def __init__(self, num_pages: int, page_size: int, ranks: ThreadRanks) -> None:
        super().__init__(num_pages, page_size)
        self.group: Group | None = ranks
        self._rank = ranks.rank

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        return super().compute_logits(hidden) if self._rank == 0 else None

    def compute_own_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self.group is not None
        each = -(-len(hidden) // self.group.size)
        own = hidden[self._rank * each : (self._rank + 1) * each]
        logits = super().compute_logits(own)
        assert logits is not None
        return torch.cat((logits, torch.zeros(each - len(logits), logits.shape[1])))


def follow_core(core: EngineCore, ranks: ThreadRanks) -> None:
    runner: Any = SimpleNamespace(
        ranks=ranks,
        give_back_memory=None,
        adapters=None,
        images=None,
        config=SimpleNamespace(model_path=""),
    )
    startup: Any = SimpleNamespace(follow=None)
    with suppress(EngineEnded):
        follow(TextEngine(Engine(core, runner, startup)), ranks)


def request(rid: str, prompt: list[int], count: int, arrival: float = 0.0) -> GenerateRequest:
    params = SamplingParams(temperature=0.0, max_new_tokens=count, ignore_eos=True)
    return GenerateRequest(rid=rid, input_ids=prompt, params=params, arrival_time=arrival)


@settings(deadline=None, max_examples=25)
@given(
    jobs=st.lists(
        st.tuples(
            st.lists(st.integers(0, 2), min_size=1, max_size=40),
            st.integers(1, 20),
            st.integers(0, 6),
        ),
        min_size=1,
        max_size=8,
    ),
    num_pages=st.integers(17, 40),
    token_budget=st.integers(4, 48),
    overlap=st.booleans(),
)
def test_ranks_compute_the_same_steps_whatever_is_asked(
    jobs: list[tuple[list[int], int, int]], num_pages: int, token_budget: int, overlap: bool
) -> None:
    """Prompts over three tokens share prefixes; few pages preempt; the first request is aborted.
    Rank 0 alone measures how many tokens a step may have beside answers.
    """
    with thread_ranks(2) as ranks:

        def run(rank: int) -> tuple[EngineCore, ToyRunner, dict[str, list[TokenOutput]]]:
            core, runner = make_core(
                num_pages=num_pages,
                token_budget=token_budget,
                overlap=overlap,
                max_running_requests=4,
                runner_class=lambda pages, size: RankRunner(pages, size, ranks),
                ranks=ranks,
                pace=PromptPace(1e-4) if rank == 0 else None,
            )
            got: dict[str, list[TokenOutput]] = {}
            if rank:
                follow_core(core, ranks)
                return core, runner, got
            for step in range(2000):
                for number, (prompt, count, delay) in enumerate(jobs):
                    if delay == step:
                        core.add(request(f"r{number}", prompt, count, float(number)))
                if step == 4:
                    core.abort(["r0"])
                if step == 5:
                    core.flush_cache()
                if step > 6 and not core.has_work:
                    break
                for output in core.step().outputs if core.has_work else []:
                    got.setdefault(output.rid, []).append(output)
            ranks.close()
            return core, runner, got

        (core, runner, got), (other, other_runner, _) = on_ranks(ranks, run)
    assert_idle(core)
    assert_idle(other)
    other.check()
    assert core.stats() == other.stats()
    assert runner.step_tokens == other_runner.step_tokens
    capacity = (num_pages - 1) * 4
    for number, (prompt, count, _) in enumerate(jobs[1:], start=1):
        expected = continuation(prompt, count)[: max(0, capacity - len(prompt))]
        assert tokens(got.get(f"r{number}", [])) == expected


def test_a_rank_that_plans_another_step_is_found_before_it_computes() -> None:
    with thread_ranks(2) as ranks:
        runners: dict[int, ToyRunner] = {}

        def run(rank: int) -> None:
            core, runners[rank] = make_core(
                token_budget=32 - rank,
                runner_class=lambda pages, size: RankRunner(pages, size, ranks),
                ranks=ranks,
            )
            if rank:
                follow_core(core, ranks)
            else:
                core.add(request("long", [1] * 50, 4))
                core.step()

        with pytest.raises(Diverged, match="rank 1 computes"):
            on_ranks(ranks, run)
    assert runners[1].step_tokens == []


def test_a_step_that_raises_ends_the_ranks_instead_of_its_request() -> None:
    """Who was in the middle of what, the others among them, cannot be known."""
    with thread_ranks(2) as ranks:

        class Faulty(RankRunner):
            def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
                raise RuntimeError("a fault")

        def run(rank: int) -> None:
            core, _ = make_core(
                runner_class=lambda pages, size: Faulty(pages, size, ranks), ranks=ranks
            )
            if rank:
                follow_core(core, ranks)
            core.add(request("one", [1, 2], 4))
            core.step()

        with pytest.raises(RuntimeError, match="a fault"):
            on_ranks(ranks, run)
