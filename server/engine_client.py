"""The only door to the runtime: starts and supervises the engine process, sends it requests, turns its tokens into text."""

from __future__ import annotations

from collections.abc import AsyncIterator
from enum import StrEnum
from typing import Protocol

from ..runtime.generation import GenerationOutput, GenerationRequest
from ..runtime.messages import EngineInfo, EngineStats
from ..runtime.tokenizer import Tokenizer


class EngineState(StrEnum):
    """Where the engine process stands."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


class EngineUnavailable(Exception):
    """The engine is gone for good, or stopping; requests cannot be served."""


class QueueFull(Exception):
    """`--max-queued-requests` requests wait already. `retry_after`: seconds."""

    retry_after: int = 1


class Engine(Protocol):
    """What the HTTP side sees of the runtime. `EngineClient` is the real one, tests bring a scripted one."""

    state: EngineState
    info: EngineInfo | None
    stats: EngineStats
    tokenizer: Tokenizer

    def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationOutput]:
        """Outputs of one sequence until one carries a finish reason. Closing the iterator early aborts the request.

        Raises `QueueFull` and `EngineUnavailable` on the first `__anext__`.
        """
        ...

    async def abort(self, rid: str | None) -> int:
        """Abort every request whose id is `rid` or begins with `rid` + "-" (None: all); their iterators end with
        `FinishReason.ABORT`. Returns how many."""
        ...

    async def flush_cache(self) -> int:
        """Drop cached prefixes that no request uses; returns the number of tokens freed."""
        ...
