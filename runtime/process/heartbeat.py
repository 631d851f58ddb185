"""The heartbeat of an engine.

Its loop sends it, because a separate thread would continue even if the loop hangs.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ..core.messages import EngineAlive

# Period of the heartbeat of an idle loop. A busy loop sends at most one per period.
BEAT_MS = 1000
_WAITING = "waiting for requests"


class Heartbeat:
    """Sends heartbeats by `send`. The loop calls `beat` between steps, and `beat_again` within long
    steps.
    """

    def __init__(self, send: Callable[[EngineAlive], None]) -> None:
        self._send = send
        self._last = EngineAlive(doing="")
        self._due = 0.0

    def beat(self, doing: str, *, may_build: bool = False) -> None:
        """Send a heartbeat if a period has passed, or if `doing` or `may_build` has changed.

        `may_build` is that of `EngineAlive`.
        """
        now, last = time.monotonic(), self._last
        if now >= self._due or doing != last.doing or may_build != last.may_build:
            self._due = now + BEAT_MS / 1000
            self._last = EngineAlive(doing=doing, may_build=may_build)
            self._send(self._last)

    def wait(self, comes: Callable[[int], bool], rest: Callable[[], None]) -> None:
        """Wait until `comes` returns True, and send heartbeats meanwhile.

        `comes` waits for a message up to a number of milliseconds. After the first period without a
        message, call `rest` once, which frees memory. Not sooner, because the next step may need
        that memory at once.
        """
        self.beat(_WAITING)
        if comes(BEAT_MS):
            return
        rest()
        self.beat(_WAITING)
        while not comes(BEAT_MS):
            self.beat(_WAITING)

    def beat_again(self) -> None:
        """Send the last heartbeat again if a period has passed."""
        self.beat(self._last.doing, may_build=self._last.may_build)
