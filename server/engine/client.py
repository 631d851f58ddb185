"""The only door to the engine of a language model: sends it requests, turns its tokens into
text.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from ...runtime.config import EngineConfig
from ...runtime.engine.messages import (
    CacheFlushed,
    EngineChanged,
    EngineInfo,
    EngineReady,
    EngineStats,
    FinishReason,
    FlushCache,
    GenerateRequest,
    StepOutput,
    TokenOutput,
)
from ...runtime.tokenizer.output_processor import (
    Generation,
    GenerationOutput,
    GenerationRequest,
    merge,
)
from ...runtime.tokenizer.tokenizer import Tokenizer
from .spawn import LANGUAGE_MODEL
from .state import EngineState, EngineUnavailable
from .supervisor import EngineSupervisor


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

    def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationOutput, None]:
        """Outputs of one sequence until one carries a finish reason. Closing the iterator early
        aborts the request.

        Raises `QueueFull` and `EngineUnavailable` on the first `__anext__`.
        """
        ...

    async def abort(self, rid: str | None) -> int:
        """Abort every sequence whose id is `rid`, or that belongs to it
        (`GenerationRequest.belongs_to`); None: all.

        Their iterators end with `FinishReason.ABORT`. Returns how many.
        """
        ...

    async def flush_cache(self) -> int:
        """Drop cached prefixes that no request uses; returns the number of tokens freed."""
        ...


class _Stream:
    """One request of this process: its text state, and the outputs that its consumer has not taken
    yet.
    """

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.delivered = False
        """Whether the present life of the engine has sent a token of it."""
        self._pending: list[GenerationOutput] = []
        self._arrived = asyncio.Event()

    @property
    def suspect(self) -> bool:
        return not self.delivered

    def goes_by(self, rid: str) -> bool:
        return self.generation.request.goes_by(rid)

    def to_message(self) -> GenerateRequest:
        return self.generation.to_message()

    def begin_again(self) -> None:
        self.delivered = False

    def take(self, output: TokenOutput) -> bool:
        self.delivered = True
        self._put(self.generation.push(output))
        return self.generation.finished

    def end(self, reason: FinishReason, error: str | None) -> None:
        """Its consumer sees the text that was held back, too."""
        self._put(self.generation.end(reason, error))

    def _put(self, output: GenerationOutput) -> None:
        self._pending.append(output)
        self._arrived.set()

    async def get(self) -> GenerationOutput:
        """The next output; several that came meanwhile are merged into one."""
        await self._arrived.wait()
        self._arrived.clear()
        pending, self._pending = self._pending, []
        return merge(pending)


class EngineClient(EngineSupervisor[_Stream]):
    """The real `Engine`: a supervised process. A request that has got a token in this life of it is
    no suspect.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        *,
        max_queued_requests: int = 512,
        log_level: str = "info",
        watchdog_timeout: float = 300.0,
        command: Sequence[str] = LANGUAGE_MODEL,
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        """As `EngineSupervisor`."""
        super().__init__(
            command,
            config,
            max_queued_requests=max_queued_requests,
            log_level=log_level,
            watchdog_timeout=watchdog_timeout,
            process=process,
        )
        self.info: EngineInfo | None = None
        self.stats = EngineStats()
        self.tokenizer = tokenizer
        self._flushes: deque[asyncio.Future[int]] = deque()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationOutput, None]:
        stream = _Stream(Generation(request, self.tokenizer))
        self._begin(request.rid, stream)
        finished = False
        try:
            while not finished:
                output = await stream.get()
                finished = output.finish_reason is not None
                yield output
        finally:
            self._leave(request.rid, stream)

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
                self._deliver(outputs)
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
