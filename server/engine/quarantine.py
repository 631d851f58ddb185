"""Finds the request that crashes the engine process.

After a crash, the requests that may have caused it are sent to the new process one at a time.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_KERNEL_COUNTERS = Path("/proc/vmstat")


class Blame(NamedTuple):
    """The reason why a request ends. If `sure`, the request caused the crash, not the engine."""

    reason: str
    sure: bool


class Quarantine:
    """The requests in quarantine. The engine has only one of them: `running`.

    If the process is killed or stopped from outside, `running` may not be the cause, so that
    request is run a second time. If the kernel killed the process for memory, it is not.
    """

    def __init__(self) -> None:
        self.running: str | None = None
        self._waiting: deque[str] = deque()
        self._had_second_chance: str | None = None
        self._oom_kills = 0  # `count_oom_kills()` when `running` was sent.

    def begin(self, rids: Iterable[str]) -> None:
        """Start with these requests in quarantine, for a new engine process."""
        self.running = None
        self._waiting = deque(rids)

    def next(self) -> str | None:
        """Return the next request of the quarantine, which the engine does not have yet."""
        self.running = None
        return self._waiting.popleft() if self._waiting else None

    def run(self, rid: str) -> None:
        """Record that the engine has this request."""
        self.running, self._oom_kills = rid, count_oom_kills()

    def blame(self, code: int, *, hung: bool) -> Blame | None:
        """Decide whether `running` ends, after the process ended with this exit code.

        Return None if the request may run again. `hung`: the watchdog killed the process.
        """
        killed = hung or code == -signal.SIGKILL
        for_memory = killed and not hung and count_oom_kills() > self._oom_kills
        if killed and not for_memory and self.running != self._had_second_chance:
            self._had_second_chance = self.running
            return None
        how = "ended twice"
        if killed and not for_memory:
            how = "hung again" if hung else "was killed again"
        why = ": the system killed it because memory was short" if for_memory else ""
        return Blame(
            f"the engine process {how} when it computed this request{why}",
            sure=hung or for_memory or not killed,
        )


def count_oom_kills() -> int:
    """Return how many processes Linux has killed for lack of memory since boot, also in containers.

    Return 0 if the counter cannot be read.
    """
    try:
        lines = _KERNEL_COUNTERS.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
