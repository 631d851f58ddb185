"""Finds the request that ends the engine process, by trying one at a time those that may be it."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_KERNEL_COUNTERS = Path("/proc/vmstat")


class Verdict(NamedTuple):
    """Why the request on trial is to end; `sure`: the engine is not to blame, as far as can be
    known.
    """

    reason: str
    sure: bool


class Suspects:
    """Who waits for a trial, and who is on it: the only one of them that the engine has.

    Whoever kills or stops the process from outside gets the benefit of the doubt for the request on
    trial, once; the kernel that wants its memory back does not.
    """

    def __init__(self) -> None:
        self.on_trial: str | None = None
        self._waiting: deque[str] = deque()
        self._spared: str | None = None
        """Who was on trial when the process was killed from outside, or hung."""
        self._oom_kills = 0
        """As many there had been when the trial began."""

    def begin(self, rids: Iterable[str]) -> None:
        """A new life of the engine, in which these are to be tried."""
        self.on_trial = None
        self._waiting = deque(rids)

    def next(self) -> str | None:
        """Whose turn it is."""
        return self._waiting.popleft() if self._waiting else None

    def try_out(self, rid: str | None) -> None:
        """From now on the engine has this one."""
        self.on_trial, self._oom_kills = rid, count_oom_kills()

    def judge(self, code: int, *, hung: bool) -> Verdict | None:
        """What the end of the process, with this exit code, says of the request on trial; None: it
        is tried again.

        `hung`: the watchdog has ended it.
        """
        killed = hung or code == -signal.SIGKILL
        for_memory = killed and not hung and count_oom_kills() > self._oom_kills
        if killed and not for_memory and self.on_trial != self._spared:
            self._spared = self.on_trial
            return None
        how = (
            "hung again"
            if hung
            else "was killed again"
            if killed and not for_memory
            else "ended twice"
        )
        why = ": the system killed it, for memory was short" if for_memory else ""
        return Verdict(
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
