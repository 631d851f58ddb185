"""When drafts that do not pay are tried again."""

from __future__ import annotations

_STEPS = 4  # Steps of a trial.
_FIRST_PAUSE = 128  # Steps from a trial to the next one.
_LONGEST_PAUSE = 64 * _FIRST_PAUSE


class Trials:
    """Trials of a drafter. How often it is right is only known while it drafts, and texts change.

    Each trial that fails doubles the pause until the next one, so that the cost of a drafter which
    is never right tends to nothing.
    """

    def __init__(self) -> None:
        self._pause = self._until_next = _FIRST_PAUSE
        self._left = _STEPS

    @property
    def is_due(self) -> bool:
        """Whether the next step should have drafts although they are not expected to pay."""
        return self._until_next == 0

    def note(self, *, pays: bool) -> None:
        """Note a step, and whether drafts were expected to pay in it."""
        if pays:
            self._pause = self._until_next = _FIRST_PAUSE
            self._left = _STEPS
        elif not self.is_due:
            self._until_next -= 1
        elif self._left > 1:
            self._left -= 1
        else:
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            self._until_next, self._left = self._pause, _STEPS
