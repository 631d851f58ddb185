"""Limits the time that saving evicted blocks takes from requests."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock

_SHARE = 0.01  # Share of the elapsed time that is always allowed.
_INITIAL = 2.0  # Seconds. The share of the elapsed time adds credit only up to this.
_MOST = 10.0  # Seconds. Loads add credit up to this.
_ENOUGH = 0.25  # Seconds of credit at which saving begins again after it was used up.


class SavingBudget:
    """The seconds that copying and writing evicted blocks may still take.

    Whether a block will be used again is not known when it is evicted. The budget therefore bounds
    the loss if none is: saving takes at most `_INITIAL` seconds and `_SHARE` of the time more than
    loads have gained. Loads that gain time pay for the saving of all blocks.

    When the credit is used up, saving stops until there is `_ENOUGH` again. Blocks that are evicted
    one after the other then stay together: a prefix with gaps is useless.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._seen = clock, clock()
        self._credit, self._may_save = _INITIAL, True
        self._lock = Lock()

    @property
    def may_save(self) -> bool:
        """Whether blocks may be saved now."""
        with self._lock:
            now = self._clock()
            if self._credit < _INITIAL:
                earned = _SHARE * (now - self._seen)
                self._credit = min(_INITIAL, self._credit + earned)
            self._seen = now
            self._may_save = self._credit > (0.0 if self._may_save else _ENOUGH)
            return self._may_save

    def spend(self, seconds: float) -> None:
        """Record how long copying or writing took. May be called from any thread."""
        with self._lock:
            self._credit -= seconds

    def gain(self, seconds: float) -> None:
        """Record how much sooner a prefix was loaded than computed; less than 0 if later."""
        with self._lock:
            self._credit = min(_MOST, self._credit + seconds)
