"""All that requests are given by an engine core, and cores over a toy model to compare it with."""

from __future__ import annotations

from typing import Any

import torch
from toy_runner import VOCAB, ToyRunner, make_core

from piecework.runtime.engine.core import EngineCore
from piecework.runtime.engine.messages import GenerateRequest, TokenLogprob, TokenOutput


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
