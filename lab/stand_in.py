"""A server whose engine computes nothing: what the web process spends can be measured alone.

    python -m piecework.lab.stand_in serve smollm2-135m --port 30000

`serve` takes the same flags as `piecework serve`. Every `PIECEWORK_STAND_IN_MS` milliseconds (10)
each request gets a token, until it has `max_tokens`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

from ..runtime.core.engine_info import EngineInfo
from ..runtime.core.generation import FinishReason, GenerateRequest, TokenOutput
from ..runtime.core.messages import EngineReady, EngineStats, FromEngine, StepOutput
from ..runtime.distributed.ranks import ALONE, Ranks
from ..runtime.engine.kind import Work
from ..runtime.process.job import ENGINE, command

PACE = "PIECEWORK_STAND_IN_MS"
_STATS_STEPS = 10  # Steps between two messages with statistics.
_FIRST_TOKEN, _NUM_TOKENS = 1000, 30_000  # Tokens of texts.


class StandIn:
    """Gives each request a token in each step, one token of the vocabulary after another."""

    ranks: Ranks = ALONE

    def __init__(self) -> None:
        self._seconds = float(os.environ.get(PACE, "10")) / 1e3
        self._left: dict[str, int] = {}  # Tokens that each request still gets.
        self._tokens, self._steps = count(), 0
        self._due = 0.0

    def ready(self) -> FromEngine:
        return EngineReady(
            info=EngineInfo(
                model_path="stand-in",
                architecture="StandIn",
                dtype="none",
                device="none",
                attention_backend="none",
                vocab_size=_FIRST_TOKEN + _NUM_TOKENS,
                context_length=8192,
                kv_tokens=2**20,
                page_size=16,
                max_running_requests=64,
                chunked_prefill_size=2048,
                weight_bytes=0,
                kv_bytes=0,
                start_seconds={},
            )
        )

    def connect(self, beat: Callable[[], None], pause: Callable[[], None]) -> None:
        pass

    def work(self) -> Work | None:
        return Work("standing in") if self._left else None

    def handle(self, message: Any) -> Iterable[FromEngine]:
        if isinstance(message, GenerateRequest):
            self._left[message.rid] = message.params.max_new_tokens
        return ()

    def abort(self, rids: list[str]) -> None:
        for rid in rids:
            self._left.pop(rid, None)

    def step(self) -> Sequence[StepOutput]:
        if not self._left:
            return ()
        time.sleep(max(0.0, self._due - time.monotonic()))
        self._due = time.monotonic() + self._seconds
        outputs = [self._output(rid) for rid in list(self._left)]
        self._steps += 1
        stats = self.report().stats if self._steps % _STATS_STEPS == 0 else None
        return (StepOutput(outputs=outputs, stats=stats),)

    def report(self) -> StepOutput:
        return StepOutput(outputs=[], stats=EngineStats(running_requests=len(self._left)))

    def give_back_memory(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _output(self, rid: str) -> TokenOutput:
        self._left[rid] -= 1
        reason = None
        if self._left[rid] <= 0:
            del self._left[rid]
            reason = FinishReason.LENGTH
        token = _FIRST_TOKEN + next(self._tokens) % _NUM_TOKENS
        return TokenOutput(rid=rid, token_ids=[token], finish_reason=reason)


def start_ranks(settings: dict[str, Any]) -> Ranks:
    return ALONE


def build(settings: dict[str, Any], ranks: Ranks) -> StandIn:
    return StandIn()


def main() -> int:
    from ..server.engine import spawn

    # Before the config of the server reads it.
    spawn.LANGUAGE_MODEL = command(ENGINE, "piecework.lab.stand_in")
    from ..cli.main import main as serve

    return serve()


if __name__ == "__main__":
    sys.exit(main())
