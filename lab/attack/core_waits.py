"""How long threads waited for a core, as Linux reports it: time in which other programs ran."""

from __future__ import annotations

import contextlib
from pathlib import Path

_NANOSECONDS = 1e-9


class CoreWaits:
    """The waiting times of the main threads of processes, and of the calling thread.

    `seconds` returns how long each thread has waited for a core since its start, or zeros if the
    system does not report it. To judge an interval of several threads without the machine's other
    load, subtract the largest difference. Do not subtract the sum, because the waits may overlap.
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
    """Return the seconds between two readings that other programs caused."""
    differences = (late - early for early, late in zip(before, after, strict=True))
    return max(0.0, *differences)
