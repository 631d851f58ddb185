"""Finds the request that ends the engine process: after a crash, requests that may have caused it
are given to the new process one at a time.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_KERNEL_COUNTERS = Path("/proc/vmstat")


class Blame(NamedTuple):
    """Why a request is to end; `sure`: the engine is not at fault, as far as can be known."""

    reason: str
    sure: bool


class Quarantine:
    """The requests that wait in quarantine, and `running`, the only one of them that the engine
    has.

    Where the process is killed or stopped from outside, that may have nothing to do with the
    request that runs alone, so it gets a second chance; where the kernel wants its memory back it
    does not.
    """

    def __init__(self) -> None:
        self.running: str | None = None
        self._waiting: deque[str] = deque()
        self._had_second_chance: str | None = None
        self._oom_kills = 0
        """As many there had been when the request began to run."""

    def begin(self, rids: Iterable[str]) -> None:
        """A new life of the engine, in which these are in quarantine."""
        self.running = None
        self._waiting = deque(rids)

    def next(self) -> str | None:
        """Which may leave quarantine; the engine does not have it yet."""
        self.running = None
        return self._waiting.popleft() if self._waiting else None

    def run(self, rid: str) -> None:
        """From now on the engine has this one."""
        self.running, self._oom_kills = rid, count_oom_kills()

    def blame(self, code: int, *, hung: bool) -> Blame | None:
        """What the end of the process, with this exit code, says of the request that ran alone;
        None: it may run again.

        `hung`: the watchdog has ended it.
        """
        killed = hung or code == -signal.SIGKILL
        for_memory = killed and not hung and count_oom_kills() > self._oom_kills
        if killed and not for_memory and self.running != self._had_second_chance:
            self._had_second_chance = self.running
            return None
        how = "ended twice"
        if killed and not for_memory:
            how = "hung again" if hung else "was killed again"
        why = ": the system killed it, for memory was short" if for_memory else ""
        return Blame(
            f"the engine process {how} when it computed this request{why}",
            sure=hung or for_memory or not killed,
        )


def count_oom_kills() -> int:
    """Processes that Linux has killed for want of memory since it started, those of containers too;
    0 where it does not tell.
    """
    try:
        lines = _KERNEL_COUNTERS.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
