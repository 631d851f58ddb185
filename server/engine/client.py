"""The only door to the engine of a language model: sends it requests, hands out what it makes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, Unpack

from ...runtime.config import EngineConfig
from ...runtime.engine.messages import (
    CacheFlushed,
    EngineChanged,
    EngineInfo,
    EngineReady,
    EngineStats,
    FlushCache,
    StepOutput,
)
from ...runtime.tokenizer.output_processor import RequestState, process_outputs
from ...runtime.tokenizer.tokenizer import Tokenizer
from .spawn import LANGUAGE_MODEL
from .state import EngineState, EngineUnavailable
from .supervisor import EngineSupervisor, SupervisorSettings


class Engine(Protocol):
    """What the HTTP side sees of the runtime. `EngineClient` is the real one, tests bring a
    scripted one.
    """

    state: EngineState
    info: EngineInfo | None
    stats: EngineStats
    restarts: int
    hangs: int
    tokenizer: Tokenizer

    @property
    def silence(self) -> float:
        """As in `AnyEngine`."""
        ...

    @property
    def capacity(self) -> int:
        """Most sequences that run and wait at once."""
        ...

    def require_room(self, count: int) -> None:
        """Raises `QueueFull` and `EngineUnavailable` where `count` more sequences are not taken
        now.
        """
        ...

    def add_request(self, request: RequestState) -> None:
        """Its `deliver` is called with each output, until one carries a finish reason.

        Raises `QueueFull` and `EngineUnavailable`.
        """
        ...

    def drop(self, requests: Iterable[RequestState]) -> None:
        """Nobody waits for these any more: what is unfinished of them is aborted."""
        ...

    async def abort(self, rid: str | None) -> int:
        """Abort every request whose id is `rid`, or that belongs to it; None: all.

        Their last output says `FinishReason.ABORT`. Returns how many.
        """
        ...

    async def flush_cache(self) -> int:
        """Drop cached prefixes that no request uses; returns the number of tokens freed."""
        ...


class EngineClient(EngineSupervisor[RequestState]):
    """The real `Engine`: a supervised process."""

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

    async def flush_cache(self) -> int:
        if self.state is not EngineState.READY:
            raise EngineUnavailable(f"the engine is {self.state}")
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._flushes.append(answer)
        self._send(FlushCache())
        return await answer

    def _handle(self, message: Any) -> None:
        match message:
            case StepOutput(outputs=outputs, stats=stats):
                self.stats = stats
                self._after_step(outputs, *process_outputs(self._requests, outputs))
            case EngineReady(info=info):
                self._became_ready(info)
            case EngineChanged(info=info):
                self.info = info
            case CacheFlushed(freed_tokens=freed):
                answer = self._flushes.popleft()
                if not answer.done():
                    answer.set_result(freed)
            case _:
                super()._handle(message)

    def _interrupted(self, reason: str) -> None:
        while self._flushes:
            answer = self._flushes.popleft()
            if not answer.done():
                answer.set_exception(EngineUnavailable(reason))
