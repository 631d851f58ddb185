"""The only door to the engine of a language model: sends it requests, hands out what it makes."""

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
from .spawn import LANGUAGE_MODEL
from .state import EngineState, EngineUnavailable
from .supervisor import EngineSupervisor, SupervisorSettings

T = TypeVar("T")


class EngineClient(EngineSupervisor[RequestState]):
    """A supervised process of a language model.

    A request's `deliver` is called with each output, until one carries a finish reason.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        *,
        command: Sequence[str] = LANGUAGE_MODEL,
        **settings: Unpack[SupervisorSettings],
    ) -> None:
        """`settings`: as `EngineSupervisor` takes them."""
        super().__init__(command, config, **settings)
        self.info: EngineInfo | None = None
        self.stats = EngineStats()
        self.tokenizer = tokenizer
        self._flushes: deque[asyncio.Future[int]] = deque()
        self._profiles: deque[asyncio.Future[ProfileAnswer]] = deque()

    async def flush_cache(self) -> int:
        """Drop cached prefixes that no request uses; returns the number of tokens freed."""
        return await self._ask(FlushCache(), self._flushes)

    async def profile(self, message: StartProfile | StopProfile) -> list[ProfileAnswer]:
        """Begin or end a profile; the answer of each engine."""
        return [await self._ask(message, self._profiles)]

    async def _ask(self, message: ToEngine, waiting: deque[asyncio.Future[T]]) -> T:
        """The engine's answer, which come in the order of the questions."""
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
                    # Of a request that a new life of the engine goes on with, the first counts.
                    if (request := self._requests.get(rid)) and request.started is None:
                        request.started = moment
                self._after_step(outputs, *process_outputs(self._requests, outputs))
            case EngineReady(info=info):
                self._became_ready(info)
            case EngineChanged(info=info):
                self.info = info
            case CacheFlushed(freed_tokens=freed):
                _tell(self._flushes, freed)
            case ProfileAnswer():
                _tell(self._profiles, message)
            case _:
                super()._handle(message)

    def _interrupted(self, reason: str) -> None:
        for waiting in (self._flushes, self._profiles):
            while waiting:
                answer: asyncio.Future[Any] = waiting.popleft()
                if not answer.done():
                    answer.set_exception(EngineUnavailable(reason))


def _tell(waiting: deque[asyncio.Future[T]], answer: T) -> None:
    """Whoever asked first, unless they are gone, or the engine is being stopped: it answers what it
    was asked before that.
    """
    if waiting and not (first := waiting.popleft()).done():
        first.set_result(answer)
