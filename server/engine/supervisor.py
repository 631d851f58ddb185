"""Keeps an engine process alive: starts it, starts it again when it crashes, and gives it back what
was unfinished.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
from collections.abc import Sequence
from typing import Any, Protocol, TypedDict

from ...runtime.core.generation import FinishReason
from ...runtime.core.messages import EngineAlive, EngineFailed, Shutdown
from ...runtime.process.ipc import Unreadable, decode
from .connection import EngineConnection
from .crash_limit import CrashLimit
from .interface import Engine
from .spawn import spawn
from .state import EngineState, EngineUnavailable, QueueFull
from .unfinished import R, UnfinishedRequests
from .watchdog import Watchdog

logger = logging.getLogger(__name__)

_STOP_TIMEOUT = 5.0


class ServerSettings(Protocol):
    """The settings of a server that concern the supervision of its engine."""

    @property
    def max_queued_requests(self) -> int: ...

    @property
    def log_level(self) -> str: ...

    @property
    def watchdog_timeout(self) -> float: ...


class SupervisorSettings(TypedDict, total=False):
    """What every engine client hands on to its supervisor."""

    max_queued_requests: int
    log_level: str
    watchdog_timeout: float
    process: subprocess.Popen[bytes] | None


def settings_of(
    config: ServerSettings, process: subprocess.Popen[bytes] | None
) -> SupervisorSettings:
    """What a server's settings say of the supervision of its engine."""
    return SupervisorSettings(
        max_queued_requests=config.max_queued_requests,
        log_level=config.log_level,
        watchdog_timeout=config.watchdog_timeout,
        process=process,
    )


class EngineSupervisor(UnfinishedRequests[R]):
    """An engine process behind a socket, and the requests that it has.

    When the process ends unexpectedly it is started again, and every unfinished request resumes.
    Those of which it had delivered nothing, one of which may have ended it, are quarantined: they
    resume one at a time, and should the process end again, the one that it had is answered with an
    error. `failed` is set when the
    engine is given up; `failure` then says why, `user_error` whether the user can mend it.
    `restarts` says how often the process was started again, `hangs` how often the watchdog ended
    it; `stats` has at least running and queued requests and steps; `replicas` are of `Replicas`.
    Subclasses handle the messages of their kind of engine.
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
        """`config`: the dataclass that the process of `command` is told; `process`: one that waits
        for its job already.

        `watchdog_timeout`: seconds of silence after which the process is taken to hang, and killed;
        0: never.
        """
        super().__init__()
        self.state = EngineState.STARTING
        self.info: Any = None
        self.stats: Any = None
        self.restarts = self.hangs = 0
        self.replicas: Sequence[Engine] = ()
        self.failed = asyncio.Event()
        self.failure: str | None = None
        self.user_error = False
        self._command = command
        self._waiting = process
        self._config = config
        self._max_queued = max_queued_requests
        self._log_level = log_level
        self._ready = asyncio.Event()
        self._draining = False
        self._stopped = False
        self._crashes = CrashLimit()
        self._watchdog = Watchdog(watchdog_timeout)
        self._hung = False
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def engine_pid(self) -> int | None:
        """The engine process's id while it lives."""
        return self._life.pid if self._life is not None else None

    @property
    def silence(self) -> float:
        """Seconds since the engine process's last sign of life."""
        return self._watchdog.silence

    async def start(self) -> None:
        """Start the engine process; returns at once, `wait_ready` waits until it serves. It may be
        started again once it was stopped.
        """
        self.state = EngineState.STARTING
        self.failure, self.user_error = None, False
        self._draining = self._stopped = False
        self._ready.clear()
        self.failed.clear()
        self._crashes = CrashLimit()
        self._supervisor = asyncio.create_task(self._supervise())

    async def wait_ready(self) -> bool:
        """True once the engine serves, False where it was given up."""
        waits = [asyncio.create_task(event.wait()) for event in (self._ready, self.failed)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return self._ready.is_set()

    async def drain(self, timeout: float) -> None:
        """Take no new request; wait for those under way, and after `timeout` seconds abort what is
        left.
        """
        self._draining = True
        if self.state in (EngineState.READY, EngineState.UNRESPONSIVE):
            self.state = EngineState.DRAINING
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout)
        await self.abort(None)

    async def stop(self, *, at_once: bool = False) -> None:
        """End the engine process; `at_once` does not wait until it hears, for it may be loading or
        in a long step.
        """
        self._stopped = True
        self.state = EngineState.STOPPED
        self._tell_who_waits("the engine is stopped", FinishReason.ABORT, None)
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
        """Most requests that run and wait at once."""
        return self._max_queued + (self.info.max_running_requests if self.info is not None else 0)

    def require_open(self) -> None:
        """Raises `EngineUnavailable` where no request is taken any more."""
        if self._draining or self.state in (EngineState.FAILED, EngineState.STOPPED):
            raise EngineUnavailable(self.failure or "the server is stopping")

    def require_room(self, count: int) -> None:
        """Raises `QueueFull` and `EngineUnavailable` where `count` more requests are not taken
        now.
        """
        self.require_open()
        if len(self._requests) + count > self.capacity:
            raise QueueFull(f"{len(self._requests)} requests are running or waiting already")

    # For subclasses: requests come, are served, and go

    def _receive(self, frames: list[bytes]) -> None:
        """Handle a message of the engine. What cannot be read ends the requests that it speaks of,
        as far as that can be told.

        Raises what makes this life of the engine useless: its requests then resume in the next one.
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
        """A message of the engine; subclasses match their own and leave the rest to this."""
        match message:
            case EngineAlive():
                self._watchdog.told(message)
            case EngineFailed():
                self.failure, self.user_error = message.message, True

    def _interrupted(self, reason: str) -> None:
        """The engine process has ended, and what was asked of it beside requests stays
        unanswered.
        """

    def _became_ready(self, info: Any) -> None:
        self.info = info
        if not self._stopped:
            self.state = EngineState.DRAINING if self._draining else EngineState.READY
            self._ready.set()

    def add_request(self, request: R) -> None:
        """Raises `QueueFull` and `EngineUnavailable`."""
        self.require_room(1)
        self._send(request.to_message())
        self._requests[request.rid] = request
        self._idle.clear()

    # The process's lives

    async def _supervise(self) -> None:
        """Until the engine is stopped or given up; what goes wrong with that gives it up, for a
        server without an engine must end.
        """
        try:
            await self._keep_alive()
        except Exception as error:
            logger.exception("the engine process cannot be kept alive")
            self._give_up(
                f"the engine process cannot be kept alive: {error or type(error).__name__}"
            )

    async def _keep_alive(self) -> None:
        """Start the engine and start it again when it crashes, until it is stopped or given up."""
        while not self._stopped:
            code = await self._live_once()
            if self._stopped:
                return
            if self.failure is not None:
                self._give_up(self.failure)
                return
            served = self.state in (
                EngineState.READY,
                EngineState.UNRESPONSIVE,
                EngineState.DRAINING,
            )
            excused = served and self._end_who_is_to_blame(code, hung=self._hung)
            if reason := self._crashes.count(code, served=served, excused=excused):
                self._give_up(reason)
                return
            self._survive_crash(code)

    async def _live_once(self) -> int:
        """One life of the engine process, which begins with every unfinished request; returns its
        exit code.
        """
        with EngineConnection() as self._life:
            self._resume(crashed=self.restarts > 0)
            process, self._waiting = self._waiting or spawn(self._command), None
            self._hung = False
            self._watchdog.begin()
            watch = asyncio.create_task(self._watch(self._life))
            try:
                code = await self._life.run(process, self._config, self._log_level, self._receive)
            finally:
                watch.cancel()
        self._life = None
        return code

    async def _watch(self, life: EngineConnection) -> None:
        """Kill a process that hangs, which may be a stopped one: nothing but SIGKILL ends those."""
        watchdog = self._watchdog
        await watchdog.watch(lambda: life.pid, self._look)
        self._hung = True
        self.hangs += 1
        self._crashes.waited(watchdog.silence)
        logger.error(
            "the engine process hangs: no sign of life for %.0f s (--watchdog-timeout), last %s; "
            "it prints what it does, if it still can, "
            "and is killed",
            watchdog.silence,
            watchdog.doing,
        )
        await life.dump_and_kill()

    def _look(self) -> None:
        """Not ready while it is silent for long, and ready again when it is heard."""
        worried = self._watchdog.worried
        if worried and self.state is EngineState.READY:
            self.state = EngineState.UNRESPONSIVE
            logger.warning(
                "no sign of life of the engine process for %.0f s, last %s",
                self._watchdog.silence,
                self._watchdog.doing,
            )
        elif not worried and self.state is EngineState.UNRESPONSIVE:
            self.state = EngineState.READY

    def _survive_crash(self, code: int) -> None:
        logger.error(
            "the engine process ended unexpectedly (exit code %s); starting it again, %d requests "
            "resume",
            code,
            len(self._requests),
        )
        self.state = EngineState.RESTARTING
        self.restarts += 1
        self._ready.clear()
        self._interrupted("the engine process ended")

    def _give_up(self, reason: str) -> None:
        """The server ends."""
        self.state, self.failure = EngineState.FAILED, reason
        self._tell_who_waits(reason, FinishReason.ERROR, f"the engine is gone: {reason}")
        self.failed.set()

    def _tell_who_waits(self, reason: str, finish: FinishReason, error: str | None) -> None:
        """Whatever goes wrong with it, the server goes on."""
        try:
            self._interrupted(reason)
            self._end_all(finish, error)
        except Exception:
            logger.exception("requests could not be told that the engine is gone")
