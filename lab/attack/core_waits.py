"""How long threads waited for a processor core, as Linux tells: time that other programs took."""

from __future__ import annotations

import contextlib
from pathlib import Path

_NANOSECONDS = 1e-9


class CoreWaits:
    """The main threads of processes, and the thread that asks. `seconds` tells how long each waited
    for a core since it began, or zeros where the system does not tell.

    An interval that the threads share can be judged without the machine's other work: subtract the
    largest difference. Never their sum, because the waits may overlap.
    """

    def __init__(self, *pids: int | None) -> None:
        files = ["/proc/thread-self/schedstat", *(f"/proc/{pid}/schedstat" for pid in pids if pid)]
        self._files = [Path(file) for file in files]

    def seconds(self) -> list[float]:
        return [self._read(file) for file in self._files]

    @staticmethod
    def _read(file: Path) -> float:
        # Processor time, time on the run queue, number of time slices.
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int(file.read_text().split()[1]) * _NANOSECONDS
        return 0.0


def waited(before: list[float], after: list[float]) -> float:
    """Seconds between two readings that the machine, not the process, is to blame for."""
    differences = (late - early for early, late in zip(before, after, strict=True))
    return max(0.0, *differences)
