"""How much longer a step takes with one more row."""

from __future__ import annotations

_DECAY = 0.98  # Weight of earlier steps after one more step.
_FIRST_SHARE = 0.08  # Assumed cost of a row as a share of a step, before steps were measured.
_LEAST_SHARE = 0.002
_VARIED = 4.0  # Variance of the numbers of rows at which the slope is trusted.


class StepCosts:
    """A line through the measured times of steps: seconds = mean + slope * (rows - mean rows).

    Recent steps count more, because the time changes with the length of the texts. The slope is
    kept as a share of the mean time while the number of rows does not vary.
    """

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = 0.0
        self._rows_rows = self._rows_seconds = 0.0
        self._share: float | None = None  # Cost of a row as a share of the mean time.

    def add(self, rows: int, seconds: float) -> None:
        """Count a step that only continued answers."""
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
        mean = self._seconds or 1.0
        return max(mean + self.seconds_of_row * (rows - self._rows), 0.1 * mean)

    @property
    def seconds_of_row(self) -> float:
        """The time that one more row takes."""
        share = _FIRST_SHARE if self._share is None else max(self._share, _LEAST_SHARE)
        return share * (self._seconds or 1.0)
