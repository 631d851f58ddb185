"""Decides when an engine process that crashes repeatedly is not restarted."""

from __future__ import annotations

import time
from collections import deque

# An engine that crashes CRASH_LIMIT times within CRASH_WINDOW seconds, or CRASH_LIMIT times before
# it is ready, is not restarted.
CRASH_LIMIT = 3
CRASH_WINDOW = 60.0


class CrashLimit:
    """Counts the crashes of an engine process."""

    def __init__(self) -> None:
        self._crashes: deque[float] = deque()
        self._never_ready = 0
        self._waited = 0.0

    def waited(self, seconds: float) -> None:
        """Leave out the seconds for which the watchdog waited for a process that hung.

        Without this, engines that hang one after another would never crash often enough within
        CRASH_WINDOW.
        """
        self._waited += seconds

    def count(self, code: int, *, served: bool, excused: bool) -> str | None:
        """Count a crash. Return why the engine is not restarted, or None if it is.

        `served`: the process had been ready. `excused`: a request caused the crash, so the crash
        does not count within the window.
        """
        self._never_ready = 0 if served else self._never_ready + 1
        if self._never_ready >= CRASH_LIMIT:
            return (
                f"the engine process ended {CRASH_LIMIT} times before it was ready, last with "
                f"exit code {code}"
            )
        now = time.monotonic() - self._waited
        if not excused:
            self._crashes.append(now)
        while self._crashes and self._crashes[0] < now - CRASH_WINDOW:
            self._crashes.popleft()
        if len(self._crashes) >= CRASH_LIMIT:
            return (
                f"the engine process ended {CRASH_LIMIT} times within {CRASH_WINDOW:.0f} s, "
                f"last with exit code {code}"
            )
        return None
