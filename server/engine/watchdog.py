"""Notices that an engine process goes on no more, though it has not ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import psutil

from ...runtime.core.messages import EngineAlive

_TICKS = 16
"""Looks within the timeout, at least one a second."""
_BUILD_PATIENCE = 4
"""A process that starts, or compiles, may wait for another one that compiles the same; times the
timeout.
"""
_STANDS_STILL = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


class Watchdog:
    """Counts the seconds in which an engine process was silent. `timeout` 0 watches nothing.

    Every message is a sign of life; the engine's loop sends one a second, also from within a long
    step. While the process starts, or says that it may compile, it is enough that it or one of its
    children uses the processor.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self.silence = 0.0
        """Seconds since the last sign of life, as far as this process could have heard one; any
        message sets it to 0.
        """
        self.doing = ""
        """What the engine said last that it did."""
        self._may_build = True
        self._used = 0.0

    def begin(self) -> None:
        """A new life of the engine."""
        self.silence, self.doing, self._may_build = 0.0, "starting", True

    def told(self, message: EngineAlive) -> None:
        """What the engine's loop says that it does."""
        self.silence, self.doing, self._may_build = 0.0, message.doing, message.may_build

    @property
    def limit(self) -> float:
        """Seconds of silence after which the process is taken to hang."""
        return self._timeout * (_BUILD_PATIENCE if self._may_build else 1)

    @property
    def worried(self) -> bool:
        """Half of the limit is over."""
        return self._timeout > 0 and self.silence >= self.limit / 2

    async def watch(self, pid: Callable[[], int | None], looked: Callable[[], None]) -> None:
        """Returns once the process hangs; never without a timeout. Calls `looked` after each
        look.
        """
        if not self._timeout:
            await asyncio.Event().wait()
        tick = min(1.0, self._timeout / _TICKS)
        while self.silence < self.limit:
            before, silent = time.monotonic(), self.silence > 0
            await asyncio.sleep(tick)
            # Who is heard need not be looked for among all processes of the machine.
            silent &= self.silence > 0
            # While this process stood still, or the whole machine, it heard nothing that was said.
            self.silence += min(time.monotonic() - before, 2 * tick)
            if silent and self._may_build and self._works(pid()):
                self.silence = 0.0
            looked()

    def _works(self, pid: int | None) -> bool:
        """Whether the process, or one that it has started, used the processor since the last
        call.
        """
        try:
            process = psutil.Process(pid)
            if process.status() in _STANDS_STILL:
                return False
            used = sum(
                sum(member.cpu_times()) for member in (process, *process.children(recursive=True))
            )
        except psutil.Error:
            return False
        self._used, before = used, self._used
        return used != before
