"""Decides how much of an image is encoded between two steps."""

from __future__ import annotations

import time
from collections.abc import Callable

# Share of the time of a step. A piece may exceed it, and the gap of a running text must stay under
# twice the step.
_SHARE = 0.5
_ALONE = 0.05  # Seconds, if no step runs in between.


class Pace:
    """By default, images are encoded half as long as the step before took.

        pace.allowance(steps)         # how many numbers may be multiplied before the next step
        pace.encoded(count, seconds)

    The time of a piece follows from that of earlier ones. Only rank 0 has a pace.
    """

    def __init__(
        self, fixed: float | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`fixed` is an allowance that does not depend on time."""
        self._fixed, self._clock = fixed, clock
        self._rate = 0.0
        self._steps = -1
        self._ended = 0.0

    def allowance(self, steps: int) -> float:
        """Return the allowance. `steps` is the number of steps so far."""
        if self._fixed is not None:
            return self._fixed
        since, self._steps = steps - self._steps, steps
        if since == 0:
            return self._rate * _ALONE
        # After more than one step, nothing is known of the last one.
        return self._rate * _SHARE * (self._clock() - self._ended) if since == 1 else 0.0

    def encoded(self, count: float, seconds: float) -> None:
        """Note how many numbers were multiplied just now."""
        self._rate, self._ended = count / max(seconds, 1e-6), self._clock()
