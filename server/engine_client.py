"""The only door to the runtime: starts and supervises the engine process, sends it requests, turns its tokens into text."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import signal
import tempfile
import time
from collections import deque
from collections.abc import AsyncGenerator
from enum import StrEnum
from itertools import count
from typing import Any, Protocol

import zmq

from ..runtime.config import EngineConfig
from ..runtime.generation import Generation, GenerationOutput, GenerationRequest, merge
from ..runtime.messages import (
    AbortRequests,
    CacheFlushed,
    EngineChanged,
    EngineFailed,
    EngineInfo,
    EngineReady,
    EngineStats,
    FinishReason,
    FlushCache,
    Shutdown,
    StepOutput,
    ToEngine,
    TokenOutput,
)
from ..runtime.tokenizer import Tokenizer
from .engine_life import EngineLife

logger = logging.getLogger(__name__)

CRASH_LIMIT = 3
CRASH_WINDOW = 60.0
"""Seconds: an engine that ends unexpectedly CRASH_LIMIT times within them is not started again."""
_STOP_TIMEOUT = 5.0


class EngineState(StrEnum):
    """Where the engine process stands."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    DRAINING = "draining"
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

    def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationOutput, None]:
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


class _Stream:
    """One request of this process: its text state, and the outputs that its consumer has not taken yet."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.delivered = False
        """Whether the present life of the engine has sent a token of it."""
        self._pending: list[GenerationOutput] = []
        self._arrived = asyncio.Event()

    def put(self, output: GenerationOutput) -> None:
        self._pending.append(output)
        self._arrived.set()

    async def get(self) -> GenerationOutput:
        """The next output; several that came meanwhile are merged into one."""
        await self._arrived.wait()
        self._arrived.clear()
        pending, self._pending = self._pending, []
        return merge(pending)


class EngineClient:
    """The real `Engine`: a supervised process behind ZeroMQ.

    When the engine process ends unexpectedly it is started again, and every unfinished request resumes from the tokens
    that it has. Requests that had not got a token yet, one of which may be what ended the process, resume one at a
    time: should it end again on the only one that is on trial, that one is answered with an error. `failed` is set when
    the engine is given up; `failure` then says why, `user_error` whether the user can mend it.
    """

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer, *, max_queued_requests: int = 512, log_level: str = "info") -> None:
        self.state = EngineState.STARTING
        self.info: EngineInfo | None = None
        self.stats = EngineStats()
        self.tokenizer = tokenizer
        self.restarts = 0
        self.failed = asyncio.Event()
        self.failure: str | None = None
        self.user_error = False
        self._config = config
        self._max_queued = max_queued_requests
        self._log_level = log_level
        self._streams: dict[str, _Stream] = {}
        self._ready = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._stopped = False
        self._flushes: deque[asyncio.Future[int]] = deque()
        self._suspects: deque[str] = deque()
        self._on_trial: str | None = None
        self._context: zmq.Context[Any] = zmq.Context()
        self._life: EngineLife | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._folder = tempfile.mkdtemp(prefix="piecework-")
        self._lives = count()

    @property
    def engine_pid(self) -> int | None:
        """The engine process's id while it lives."""
        return self._life.pid if self._life is not None else None

    async def start(self) -> None:
        """Start the engine process; returns at once, `wait_ready` waits until it serves."""
        self._supervisor = asyncio.create_task(self._supervise())

    async def wait_ready(self) -> bool:
        """True once the engine serves, False where it was given up."""
        waits = [asyncio.create_task(event.wait()) for event in (self._ready, self.failed)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        return self._ready.is_set()

    async def drain(self, timeout: float) -> None:
        """Take no new request; wait for those under way, and after `timeout` seconds abort what is left."""
        self._draining = True
        if self.state is EngineState.READY:
            self.state = EngineState.DRAINING
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout)
        await self.abort(None)

    async def stop(self, *, at_once: bool = False) -> None:
        """End the engine process; `at_once` does not wait until it hears, for it may be loading or in a long step."""
        self._stopped = True
        self.state = EngineState.STOPPED
        self._fail_streams(FinishReason.ABORT, None)
        self._send(Shutdown())
        if self._supervisor is not None:
            done, _ = await asyncio.wait([self._supervisor], timeout=0 if at_once else _STOP_TIMEOUT)
            if not done and self._life is not None:
                self._life.kill()
            await self._supervisor
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationOutput, None]:
        self._check_room()
        stream = _Stream(Generation(request, self.tokenizer))
        self._streams[request.rid] = stream
        self._idle.clear()
        self._send(stream.generation.to_message())
        finished = False
        try:
            while not finished:
                output = await stream.get()
                finished = output.finish_reason is not None
                yield output
        finally:
            if self._streams.get(request.rid) is stream:
                self._forget(request.rid)
                self._send(AbortRequests(rids=[request.rid]))

    async def abort(self, rid: str | None) -> int:
        chosen = [known for known in self._streams if rid is None or known == rid or known.startswith(f"{rid}-")]
        for known in chosen:
            self._end(known, FinishReason.ABORT, None)
        if chosen:
            self._send(AbortRequests(rids=chosen))
        return len(chosen)

    async def flush_cache(self) -> int:
        if self.state is not EngineState.READY:
            raise EngineUnavailable(f"the engine is {self.state}")
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._flushes.append(answer)
        self._send(FlushCache())
        return await answer

    def _check_room(self) -> None:
        if self._draining or self.state in (EngineState.FAILED, EngineState.STOPPED):
            raise EngineUnavailable(self.failure or "the server is stopping")
        running = self.info.max_running_requests if self.info is not None else 0
        if len(self._streams) >= running + self._max_queued:
            raise QueueFull(f"{len(self._streams)} requests are running or waiting already")

    def _send(self, message: ToEngine) -> None:
        """Between two lives nothing is sent: the next one begins with everything that is unfinished."""
        if self._life is not None:
            self._life.send(message)

    async def _supervise(self) -> None:
        """Start the engine and start it again when it crashes, until it is stopped or given up."""
        crashes: deque[float] = deque()
        while not self._stopped:
            code = await self._live_once()
            if self._stopped:
                return
            if self.failure is not None:
                self._give_up(self.failure)
                return
            crashes.append(time.monotonic())
            while crashes[0] < crashes[-1] - CRASH_WINDOW:
                crashes.popleft()
            if len(crashes) >= CRASH_LIMIT:
                self._give_up(f"the engine process ended {CRASH_LIMIT} times within {CRASH_WINDOW:.0f} s, last with exit code {code}")
                return
            self._survive_crash(code)

    async def _live_once(self) -> int:
        """One life of the engine process, which begins with every unfinished request; returns its exit code."""
        self._life = EngineLife(self._context, self._folder, next(self._lives))
        self._resume()
        code = await self._life.run(self._config, self._log_level, self._handle)
        self._life = None
        return code

    def _resume(self) -> None:
        """Send what is unfinished: at once what the last life has served, the rest one at a time."""
        crashed = self.restarts > 0
        self._suspects = deque(rid for rid, stream in self._streams.items() if crashed and not stream.delivered)
        for rid, stream in self._streams.items():
            stream.delivered = False
            if rid not in self._suspects:
                self._send(stream.generation.to_message())
        self._try_next_suspect()

    def _try_next_suspect(self) -> None:
        self._on_trial = None
        while self._suspects and self._on_trial is None:
            rid = self._suspects.popleft()
            if stream := self._streams.get(rid):
                self._on_trial = rid
                self._send(stream.generation.to_message())

    def _handle(self, message: Any) -> None:
        match message:
            case StepOutput(outputs=outputs, stats=stats):
                self.stats = stats
                self._deliver(outputs)
            case EngineReady(info=info):
                self.info = info
                if not self._stopped:
                    self.state = EngineState.DRAINING if self._draining else EngineState.READY
                    self._ready.set()
            case EngineChanged(info=info):
                self.info = info
            case EngineFailed(message=reason):
                self.failure, self.user_error = reason, True
            case CacheFlushed(freed_tokens=freed):
                answer = self._flushes.popleft()
                if not answer.done():
                    answer.set_result(freed)

    def _deliver(self, outputs: list[TokenOutput]) -> None:
        stopped: list[str] = []
        for output in outputs:
            stream = self._streams.get(output.rid)
            if stream is None:
                continue
            stream.delivered = True
            stream.put(stream.generation.push(output))
            if output.rid == self._on_trial:
                self._try_next_suspect()
            if stream.generation.finished:
                self._forget(output.rid)
                if output.finish_reason is None:  # it met a stop string, which only this side knows of
                    stopped.append(output.rid)
        if stopped:
            self._send(AbortRequests(rids=stopped))

    def _survive_crash(self, code: int) -> None:
        logger.error(
            "the engine process ended unexpectedly (exit code %s); starting it again, %d requests resume", code, len(self._streams)
        )
        served = self.state in (EngineState.READY, EngineState.DRAINING)
        self.state = EngineState.RESTARTING
        self.restarts += 1
        self._ready.clear()
        self._fail_flushes("the engine process ended")
        # A SIGKILL comes from outside: no request is to blame for it.
        if served and self._on_trial in self._streams and code != -signal.SIGKILL:
            self._end(self._on_trial, FinishReason.ERROR, "the engine process ended twice when it computed this request")

    def _give_up(self, reason: str) -> None:
        self.state, self.failure = EngineState.FAILED, reason
        self._fail_flushes(reason)
        self._fail_streams(FinishReason.ERROR, f"the engine is gone: {reason}")
        self.failed.set()

    def _fail_flushes(self, reason: str) -> None:
        while self._flushes:
            answer = self._flushes.popleft()
            if not answer.done():
                answer.set_exception(EngineUnavailable(reason))

    def _fail_streams(self, reason: FinishReason, error: str | None) -> None:
        for rid in list(self._streams):
            self._end(rid, reason, error)

    def _end(self, rid: str, reason: FinishReason, error: str | None) -> None:
        """Finish a request here; its consumer sees the text that was held back and `reason`."""
        stream = self._streams[rid]
        stream.put(stream.generation.push(TokenOutput(rid=rid, token_ids=[], finish_reason=reason, error=error)))
        self._forget(rid)

    def _forget(self, rid: str) -> None:
        del self._streams[rid]
        if rid == self._on_trial:
            self._try_next_suspect()
        if not self._streams:
            self._idle.set()
