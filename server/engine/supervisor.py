"""Keeps an engine process alive: restarts it after a crash and resumes its unfinished requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from ...runtime.core.adapter_info import AdapterInfo
from ...runtime.core.generation import FinishReason
from ...runtime.core.messages import EngineAlive, EngineFailed, Shutdown
from ...runtime.process.ipc import Unreadable, decode
from .connection import EngineConnection
from .crash_limit import CrashLimit
from .interface import Engine
from .spawn import spawn
from .state import EngineState, EngineUnavailable, Progress, QueueFull
from .successor import Successor
from .unfinished import R, UnfinishedRequests
from .watchdog import Watchdog

logger = logging.getLogger(__name__)

_STOP_TIMEOUT = 5.0
# Bounds of the seconds after which clients try again while an engine starts. OpenAI's client waits
# for at most 60 s.
LEAST_RETRY, MOST_RETRY = 5, 60


class EngineSupervisor(UnfinishedRequests[R]):
    """An engine process behind a socket, and its requests.

    If the process crashes, it is restarted and every unfinished request resumes. Requests without
    any output in the crashed process may have caused the crash, so they are quarantined: they
    resume one at a time. If the process crashes again, the request that ran alone ends with an
    error. Subclasses handle the messages of their kind of engine.

    If a process serves without kernels that must be compiled first, a `Successor` compiles them and
    takes over all unfinished requests.

    Attributes:
        failed: Set when the engine is not restarted any more.
        failure, user_error: The reason for that, and whether the user can correct it.
        restarts: How often the process was restarted.
        hangs: How often the watchdog killed the process.
        stats: Statistics with at least running requests, queued requests and steps.
        replicas: Empty, except in `Replicas`.
        adapters: The adapters (LoRA) that requests may use, by name.
    """

    def __init__(
        self,
        command: Sequence[str],
        config: Any,
        *,
        max_queued_requests: int = 512,
        log_level: str = "info",
        watchdog_timeout: float = 300.0,
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        """Create a supervisor. `start` starts the process.

        Args:
            command: The command that starts the engine process.
            config: The dataclass that is sent to the process.
            process: A process that already waits for its job.
            watchdog_timeout: Seconds of silence after which the process is killed. 0: never.
        """
        super().__init__()
        self.state = EngineState.STARTING
        self.info: Any = None
        self.stats: Any = None
        self.restarts = self.hangs = 0
        self.replicas: Sequence[Engine] = ()
        self.adapters: dict[str, AdapterInfo] = {}
        self.failed = asyncio.Event()
        self.failure: str | None = None
        self.user_error = False
        self._command = command
        self._prestarted = process
        self._config = config
        self._max_queued = max_queued_requests
        self._log_level = log_level
        self._ready = asyncio.Event()
        self._draining = False
        self._stopped = False
        self._crashes = CrashLimit()
        self._watchdog = Watchdog(watchdog_timeout)
        self._began = time.monotonic()  # The start of the current process.
        self._hung = False
        self._successor: Successor | None = None  # Not ready yet.
        self._taking_over: Successor | None = None  # Ready, and its predecessor is ending.
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def engine_pid(self) -> int | None:
        """The engine process's id, or None if it has ended."""
        return self._life.pid if self._life is not None else None

    @property
    def silence(self) -> float:
        """Seconds since the engine process's last sign of life."""
        return self._watchdog.silence

    @property
    def progress(self) -> Progress | None:
        """What the process does before it serves, or its successor before it takes over."""
        passed = int(time.monotonic() - self._began)
        if self.state in (EngineState.STARTING, EngineState.RESTARTING):
            # It is likely to take as long again as it has taken so far.
            return Progress(self._watchdog.doing, min(max(passed, LEAST_RETRY), MOST_RETRY))
        if self._successor is not None and self._successor.doing is not None:
            return Progress(f"serving without kernels; {self._successor.doing}", LEAST_RETRY)
        return None

    async def start(self) -> None:
        """Start the engine process and return at once. `wait_ready` waits until it serves.

        A stopped engine may be started again.
        """
        self.state = EngineState.STARTING
        self.failure, self.user_error = None, False
        self._draining = self._stopped = False
        self._ready.clear()
        self.failed.clear()
        self._crashes = CrashLimit()
        self._began = time.monotonic()
        self._supervisor = asyncio.create_task(self._supervise())

    async def wait_ready(self) -> bool:
        """Return True once the engine serves, False if it has failed."""
        waits = [asyncio.create_task(event.wait()) for event in (self._ready, self.failed)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return self._ready.is_set()

    async def drain(self, timeout: float) -> None:
        """Refuse new requests, wait for the others, and abort them after `timeout` seconds."""
        self._draining = True
        if self.state in (EngineState.READY, EngineState.UNRESPONSIVE):
            self.state = EngineState.DRAINING
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout)
        await self.abort(None)

    async def stop(self, *, at_once: bool = False) -> None:
        """End the engine process.

        With `at_once`, the process is killed without waiting until it reads the message. It may be
        loading a model or computing a long step.
        """
        self._stopped = True
        self.state = EngineState.STOPPED
        self._end_waiting("the engine is stopped", FinishReason.ABORT, None)
        self._send(Shutdown())
        if self._supervisor is not None:
            done, _ = await asyncio.wait(
                [self._supervisor], timeout=0 if at_once else _STOP_TIMEOUT
            )
            if not done and self._life is not None:
                self._life.kill()
            await self._supervisor
        if self.stats is not None:
            self.stats = type(self.stats)()

    @property
    def capacity(self) -> int:
        """Maximum number of requests that run and wait at once."""
        return self._max_queued + (self.info.max_running_requests if self.info is not None else 0)

    def require_open(self) -> None:
        """Raise `EngineUnavailable` if the engine takes no more requests."""
        if self._draining or self.state in (EngineState.FAILED, EngineState.STOPPED):
            raise EngineUnavailable(self.failure or "the server is stopping")

    def require_room(self, count: int) -> None:
        """Raise `QueueFull` or `EngineUnavailable` if `count` more requests cannot be added."""
        self.require_open()
        if len(self._requests) + count > self.capacity:
            raise QueueFull(f"{len(self._requests)} requests are running or waiting already")

    # For subclasses: requests and messages

    def _receive(self, frames: list[bytes]) -> None:
        """Handle a message of the engine. An unreadable message ends the requests that it names.

        If these requests are unknown, the error is raised. The process is then killed, and its
        requests resume in the next one.
        """
        try:
            message = decode(frames)
            self._watchdog.silence = 0.0
        except Unreadable as error:
            if error.known and not error.rids:
                raise
            logger.error(
                "a message of the engine cannot be read, and ends %d requests",
                len(error.rids),
                exc_info=error,
            )
            self._fail(error.rids)
        else:
            self._handle(message)

    def _handle(self, message: Any) -> None:
        """Handle a message. Subclasses handle their own messages and pass on the rest."""
        match message:
            case EngineAlive():
                self._watchdog.heard(message)
            case EngineFailed():
                self.failure, self.user_error = message.message, True

    def _interrupted(self, reason: str) -> None:
        """Called when the process has ended. Subclasses fail what waits for other answers."""

    def _became_ready(self, info: Any) -> None:
        self.info = info
        if not self._stopped:
            self.state = EngineState.DRAINING if self._draining else EngineState.READY
            self._ready.set()

    def _start_successor(self) -> None:
        """Start a process that compiles the kernels, and takes over when it is ready."""
        if not self._stopped:
            self._successor = Successor(
                self._command,
                self._config,
                self._log_level,
                take_over=self._hand_over,
                receive=self._receive,
            )

    def add_request(self, request: R) -> None:
        """Add a request. Raises `QueueFull` and `EngineUnavailable`."""
        self.require_room(1)
        self._send(request.to_message())
        self._requests[request.rid] = request
        self._idle.clear()

    # Starts and restarts of the process

    async def _supervise(self) -> None:
        """Supervise the engine until it is stopped or has failed.

        If the supervision itself raises, the engine has failed, so that the server ends.
        """
        try:
            await self._keep_alive()
        except Exception as error:
            logger.exception("the engine process cannot be kept alive")
            self._give_up(
                f"the engine process cannot be kept alive: {error or type(error).__name__}"
            )

    async def _keep_alive(self) -> None:
        """Start the engine and restart it after crashes, until it is stopped or has failed."""
        try:
            while not self._stopped:
                code = await self._live_once()
                if self._stopped:
                    return
                if self._taking_over is not None:
                    continue
                if self.failure is not None:
                    self._give_up(self.failure)
                    return
                served = self.state in (
                    EngineState.READY,
                    EngineState.UNRESPONSIVE,
                    EngineState.DRAINING,
                )
                excused = served and self._end_culprit(code, hung=self._hung)
                if reason := self._crashes.count(code, served=served, excused=excused):
                    self._give_up(reason)
                    return
                self._survive_crash(code)
        finally:
            await self._end_successors()

    async def _live_once(self) -> int:
        """Run one engine process with all unfinished requests. Return its exit code."""
        successor, self._taking_over = self._taking_over, None
        with EngineConnection() if successor is None else successor.connection as life:
            self._life = life
            if successor is None:
                self._resume(crashed=self.restarts > 0)
                process, self._prestarted = self._prestarted or spawn(self._command), None
                run = life.run(process, self._config, self._log_level, self._receive)
            self._hung = False
            self._watchdog.begin()
            watch = asyncio.create_task(self._watch(life))
            try:
                code = await (run if successor is None else successor.ended)
            finally:
                watch.cancel()
        if self._taking_over is None:
            self._life = None
            await self._end_successors()
        return code

    def _hand_over(self, successor: Successor) -> None:
        """Move all requests to a process that is ready. End the process that has served them."""
        assert self._life is not None
        logger.info(
            "the kernels are ready: another engine process takes over, with %d requests",
            len(self._requests),
        )
        self._successor, self._taking_over = None, successor
        served, self._life = self._life, successor.connection
        self._interrupted("another engine process has taken over")
        self._resume(crashed=False)
        served.end()

    async def _end_successors(self) -> None:
        for successor in (self._successor, self._taking_over):
            if successor is not None:
                successor.close()
                await asyncio.wait([successor.ended])
        self._successor = self._taking_over = None

    async def _watch(self, life: EngineConnection) -> None:
        """Kill a process that hangs. A suspended process reacts only to SIGKILL."""
        watchdog = self._watchdog
        await watchdog.watch(lambda: life.pid, self._update_state)
        self._hung = True
        self.hangs += 1
        self._crashes.waited(watchdog.silence)
        logger.error(
            "the engine process hangs: no sign of life for %.0f s (--watchdog-timeout), last %s; "
            "it prints its stacks, if it still can, and is killed",
            watchdog.silence,
            watchdog.doing,
        )
        await life.dump_and_kill()

    def _update_state(self) -> None:
        """Set UNRESPONSIVE while the process is silent for long, and READY afterwards."""
        silent = self._watchdog.is_silent
        if silent and self.state is EngineState.READY:
            self.state = EngineState.UNRESPONSIVE
            logger.warning(
                "no sign of life of the engine process for %.0f s, last %s",
                self._watchdog.silence,
                self._watchdog.doing,
            )
        elif not silent and self.state is EngineState.UNRESPONSIVE:
            self.state = EngineState.READY

    def _survive_crash(self, code: int) -> None:
        logger.error(
            "the engine process ended unexpectedly (exit code %s); restarting it, %d requests "
            "resume",
            code,
            len(self._requests),
        )
        self.state = EngineState.RESTARTING
        self.restarts += 1
        self._began = time.monotonic()
        self._ready.clear()
        self._interrupted("the engine process ended")

    def _give_up(self, reason: str) -> None:
        """Mark the engine as failed, which ends the server."""
        self.state, self.failure = EngineState.FAILED, reason
        self._end_waiting(reason, FinishReason.ERROR, f"the engine is gone: {reason}")
        self.failed.set()

    def _end_waiting(self, reason: str, finish: FinishReason, error: str | None) -> None:
        """End all requests. An error is logged and does not end the server."""
        try:
            self._interrupted(reason)
            self._end_all(finish, error)
        except Exception:
            logger.exception("requests could not be ended after the engine ended")
