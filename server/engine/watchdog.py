"""Detects an engine process that hangs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import psutil

from ...runtime.core.messages import EngineAlive

_TICKS = 16  # Checks per timeout; at least one per second.
# Factor of the timeout while a process starts or compiles. The process may wait for another process
# that compiles the same.
_BUILD_PATIENCE = 4
_SUSPENDED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


class Watchdog:
    """Counts the seconds in which an engine process was silent. `timeout` 0 disables it.

    Every message is a sign of life. The engine's loop sends one per second, also during a long
    step. While the process starts or may compile, CPU time of the process or of one of its children
    is also a sign of life.

    Attributes:
        silence: Seconds since the last sign of life, without the time in which this process itself
            was suspended.
        doing: What the engine does, according to its last message.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self.silence = 0.0
        self.doing = ""
        self._may_build = True
        self._used = 0.0  # CPU seconds at the last check.

    def begin(self) -> None:
        """Start to watch a new engine process."""
        self.silence, self.doing, self._may_build = 0.0, "starting", True

    def heard(self, message: EngineAlive) -> None:
        """Handle a sign of life of the engine's loop."""
        self.silence, self.doing, self._may_build = 0.0, message.doing, message.may_build

    @property
    def limit(self) -> float:
        """Seconds of silence after which the process counts as hanging."""
        return self._timeout * (_BUILD_PATIENCE if self._may_build else 1)

    @property
    def is_silent(self) -> bool:
        """Whether the process was silent for half of the limit."""
        return self._timeout > 0 and self.silence >= self.limit / 2

    async def watch(self, pid: Callable[[], int | None], checked: Callable[[], None]) -> None:
        """Return once the process hangs, or never if the timeout is 0.

        `checked` is called after each check.
        """
        if not self._timeout:
            await asyncio.Event().wait()
        tick = min(1.0, self._timeout / _TICKS)
        while self.silence < self.limit:
            before, silent = time.monotonic(), self.silence > 0
            await asyncio.sleep(tick)
            # If a message arrived, reading the processes of the machine is not necessary.
            silent &= self.silence > 0
            # If this process or the machine was suspended, the elapsed time does not count.
            self.silence += min(time.monotonic() - before, 2 * tick)
            if silent and self._may_build and self._works(pid()):
                self.silence = 0.0
            checked()

    def _works(self, pid: int | None) -> bool:
        """Return whether the process or a descendant used CPU time since the last call."""
        try:
            process = psutil.Process(pid)
            if process.status() in _SUSPENDED:
                return False
            used = sum(
                sum(member.cpu_times()) for member in (process, *process.children(recursive=True))
            )
        except psutil.Error:
            return False
        self._used, before = used, self._used
        return used != before
