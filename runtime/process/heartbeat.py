"""The sign of life of an engine: sent by its loop itself, for a thread beside it would go on where
the loop does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ..core.messages import EngineAlive

BEAT_MS = 1000
"""An idle loop wakes up that often to say that it lives; a busy one says so not more often."""
_WAITING = "waiting for requests"


class Heartbeat:
    """`send` takes the messages. To be told often what is done next: between steps, and from within
    a long one.
    """

    def __init__(self, send: Callable[[EngineAlive], None]) -> None:
        self._send = send
        self._last = EngineAlive(doing="")
        self._due = 0.0

    def beat(self, doing: str, *, may_build: bool = False) -> None:
        """`may_build`: as in `EngineAlive`. Costs a look at the clock, unless a second has passed
        or something else is done.
        """
        now, last = time.monotonic(), self._last
        if now >= self._due or doing != last.doing or may_build != last.may_build:
            self._due = now + BEAT_MS / 1000
            self._last = EngineAlive(doing=doing, may_build=may_build)
            self._send(self._last)

    def wait(self, comes: Callable[[int], bool], rest: Callable[[], None]) -> None:
        """Until a message `comes` within so many milliseconds; `rest` once none has for a while:
        not sooner, for what it gives up the next step may take again at once.
        """
        self.beat(_WAITING)
        if comes(BEAT_MS):
            return
        rest()
        self.beat(_WAITING)
        while not comes(BEAT_MS):
            self.beat(_WAITING)

    def beat_again(self) -> None:
        """From within what was told last."""
        self.beat(self._last.doing, may_build=self._last.may_build)
