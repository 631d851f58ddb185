"""How long steps take: with one more row, with proposals, and while the host plans the next one."""

from __future__ import annotations

import time

from ..executor.step import PendingStep

_DECAY = 0.98  # Weight of earlier steps after one more step.
_FIRST_SHARE = 0.08  # Assumed cost of a row as a share of a step of one row.
_LEAST_SHARE = 0.002
_VARIED = 4.0  # Variance of the numbers of rows at which the slope is trusted.
_PAUSE = 0.25  # Seconds between two steps after which the engine must have been idle.
_STEPS_KNOWN = 128  # Plain steps after which the time of a step alone is out of date.


class StepCosts:
    """A line through the measured times of steps: seconds = mean + slope * (rows - mean rows).

    Recent steps count more, because the time changes with the length of the texts. The slope is
    kept as a share of the mean time while the number of rows does not vary.
    """

    def __init__(self) -> None:
        self._share: float | None = None  # Cost of a row as a share of the mean time.
        self._is_warm = False
        self.forget()

    def forget(self) -> None:
        """Forget the mean time. Keep the share that a row takes of it."""
        self._weight = self._rows = self._seconds = 0.0
        self._rows_rows = self._rows_seconds = 0.0

    def add(self, rows: int, seconds: float) -> None:
        """Count a step that only continued answers."""
        if not self._is_warm:
            # The first step of a process also compiles or fills caches.
            self._is_warm = True
            return
        # A step that took much longer than usual waited for something else.
        if self._weight >= 8 and seconds > 4 * self.seconds(rows):
            return
        self._weight = self._weight * _DECAY + 1.0
        step = 1.0 / self._weight
        from_rows, from_seconds = rows - self._rows, seconds - self._seconds
        self._rows += step * from_rows
        self._seconds += step * from_seconds
        self._rows_rows += step * (from_rows * (rows - self._rows) - self._rows_rows)
        self._rows_seconds += step * (from_rows * (seconds - self._seconds) - self._rows_seconds)
        if self._rows_rows >= _VARIED:
            self._share = self._rows_seconds / self._rows_rows / self._seconds

    @property
    def is_known(self) -> bool:
        """Whether a step was measured."""
        return self._weight > 0

    def seconds(self, rows: int) -> float:
        """Return the expected time of a step. The unit is arbitrary before the first step."""
        mean = self._mean
        return max(mean + self.seconds_of_row * (rows - self._rows), 0.1 * mean)

    @property
    def seconds_of_row(self) -> float:
        """The time that one more row takes."""
        if self._share is not None:
            return max(self._share, _LEAST_SHARE) * self._mean
        return _FIRST_SHARE * self._mean / (1 + _FIRST_SHARE * max(0.0, self._rows - 1))

    @property
    def _mean(self) -> float:
        return self._seconds if self.is_known else 1.0


class DecodeCosts:
    """The times from one decode step to the next.

    On devices, steps overlap: the host plans a step while the device computes the one before. A
    step with proposals is alone, because the host must first read the tokens that it continues. Its
    time therefore includes the work of the host. On a CPU, every step is alone, but a step with
    proposals may run other kernels: one row more can begin another block of rows.
    """

    def __init__(self) -> None:
        # The times of steps with proposals, or alone beside steps that overlap, and all others.
        self._alone, self._plain = StepCosts(), StepCosts()
        self._overlaps = False
        self._since_alone = 0  # Plain steps since the last one alone.
        self._last_read = self._drafting = 0.0

    def drafted(self, seconds: float) -> None:
        """Note that drafts for the next step took this time, which is not a part of the step."""
        self._drafting = seconds

    def read(self, step: PendingStep) -> None:
        """Note that the tokens of a step have just arrived."""
        now = time.perf_counter()
        begin, self._last_read = self._last_read + self._drafting, now
        self._drafting = 0.0
        if not step.is_decode or step.has_given_rows or step.began - begin > _PAUSE:
            return
        seconds = now - begin
        self._overlaps |= step.is_overlapped
        if step.has_proposals or (self._overlaps and not step.is_overlapped):
            self._since_alone = 0
            self._alone.add(step.num_tokens, seconds)
            return
        self._plain.add(step.num_tokens, seconds)
        self._since_alone += 1
        if self._since_alone == _STEPS_KNOWN:
            # The next promising proposals are tried, and measured.
            self._alone.forget()

    def plain(self, rows: int) -> float:
        """Return the expected time of a step without proposals."""
        costs = self._plain if self._plain.is_known else self._alone
        return costs.seconds(rows)

    def verifying(self, rows: int) -> float:
        """Return the expected time of a step with proposals."""
        return self._verifying.seconds(rows)

    @property
    def of_row(self) -> float:
        """The time that one more row takes in a step with proposals."""
        return self._verifying.seconds_of_row

    @property
    def _verifying(self) -> StepCosts:
        return self._alone if self._alone.is_known else self._plain
