"""When an engine process that crashes again and again is given up."""

from __future__ import annotations

import time
from collections import deque

CRASH_LIMIT = 3
CRASH_WINDOW = 60.0
"""Seconds: an engine that ends unexpectedly CRASH_LIMIT times within them, or that often before it
is ready, is not started again.
"""


class CrashLimit:
    """Counts the unexpected ends of an engine process."""

    def __init__(self) -> None:
        self._crashes: deque[float] = deque()
        self._never_ready = 0
        self._waited = 0.0

    def waited(self, seconds: float) -> None:
        """The watchdog waited so long for a process that hung. Time stands still meanwhile: engines
        that hang one after another crash within a short time.
        """
        self._waited += seconds

    def count(self, code: int, *, served: bool, excused: bool) -> str | None:
        """The process has ended with this exit code; why it is given up, None: it is not.

        `served`: it had been ready. `excused`: a request is to blame, which says nothing of the
        engine.
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
