"""The client of a language model's engine: sends requests, and delivers their outputs."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, TypeVar, Unpack

from ...runtime.config.engine import EngineConfig
from ...runtime.core.engine_info import EngineInfo
from ...runtime.core.messages import (
    CacheFlushed,
    EngineChanged,
    EngineReady,
    EngineStats,
    FlushCache,
    ProfileAnswer,
    StartProfile,
    StepOutput,
    StopProfile,
    ToEngine,
)
from ...runtime.tokenizer.output_processor import RequestState, process_outputs
from ...runtime.tokenizer.tokenizer import Tokenizer
from .settings import SupervisorSettings
from .spawn import LANGUAGE_MODEL
from .state import EngineState, EngineUnavailable
from .supervisor import EngineSupervisor

T = TypeVar("T")


class EngineClient(EngineSupervisor[RequestState]):
    """A supervised engine process of a language model.

    `deliver` of a request is called with each output. The last output has a finish reason.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        *,
        command: Sequence[str] = LANGUAGE_MODEL,
        **settings: Unpack[SupervisorSettings],
    ) -> None:
        """`settings` are the keyword arguments of `EngineSupervisor`."""
        super().__init__(command, config, **settings)
        self.info: EngineInfo | None = None
        self.stats = EngineStats()
        self.tokenizer = tokenizer
        self._flushes: deque[asyncio.Future[int]] = deque()
        self._profiles: deque[asyncio.Future[ProfileAnswer]] = deque()

    async def flush_cache(self) -> int:
        """Drop cached prefixes that no request uses. Return the number of tokens freed."""
        return await self._ask(FlushCache(), self._flushes)

    async def profile(self, message: StartProfile | StopProfile) -> list[ProfileAnswer]:
        """Start or stop a profile. Return the answer of each engine."""
        return [await self._ask(message, self._profiles)]

    async def _ask(self, message: ToEngine, waiting: deque[asyncio.Future[T]]) -> T:
        """Send a message and return its answer. The engine answers in the order of the messages."""
        if self.state is not EngineState.READY:
            raise EngineUnavailable(f"the engine is {self.state}")
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        waiting.append(answer)
        self._send(message)
        return await answer

    def _handle(self, message: Any) -> None:
        match message:
            case StepOutput(outputs=outputs, stats=stats, started=started):
                self.stats = stats or self.stats
                for rid, moment in started.items():
                    # If a request was resumed after a crash, its first start counts.
                    if (request := self._requests.get(rid)) and request.started is None:
                        request.started = moment
                self._after_step(outputs, *process_outputs(self._requests, outputs))
            case EngineReady(info=info):
                self._became_ready(info)
                if info.awaits_kernels:
                    self._start_successor()
            case EngineChanged(info=info):
                self.info = info
            case CacheFlushed(freed_tokens=freed):
                _resolve_first(self._flushes, freed)
            case ProfileAnswer():
                _resolve_first(self._profiles, message)
            case _:
                super()._handle(message)

    def _interrupted(self, reason: str) -> None:
        for waiting in (self._flushes, self._profiles):
            while waiting:
                answer: asyncio.Future[Any] = waiting.popleft()
                if not answer.done():
                    answer.set_exception(EngineUnavailable(reason))


def _resolve_first(waiting: deque[asyncio.Future[T]], answer: T) -> None:
    """Set the result of the oldest future, unless its caller is gone.

    `waiting` may be empty: an engine that is being stopped still answers earlier messages.
    """
    if waiting and not (first := waiting.popleft()).done():
        first.set_result(answer)
