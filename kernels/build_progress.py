"""Reports what is compiled: on standard error, and to the process that waits for it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

# Called with what this process does now, in one line. An engine process sends it to its server.
listeners: list[Callable[[str], None]] = []


def report(line: str) -> None:
    for listener in listeners:
        listener(line)


class Progress:
    """Files of a build that are compiled, counted by the threads that compile them.

        with Progress("CPU kernels", 25) as progress:
            progress.advance("linear")

    A terminal shows a line that changes. Other outputs get a line at the start and at the end.
    """

    def __init__(self, what: str, count: int) -> None:
        self._what, self._count, self._done = what, count, 0
        self._lock = threading.Lock()
        self._is_terminal = sys.stderr.isatty()

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        self._say(f"compiling {self._what}: {self._count} files", ends=not self._is_terminal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        seconds = time.monotonic() - self._began
        done = "compiled" if error is None else "failed to compile"
        self._say(f"{done} {self._what}: {self._done} files in {seconds:.1f} s", ends=True)

    def advance(self, name: str) -> None:
        """Count a file that is compiled. Several threads may call this."""
        with self._lock:
            self._done += 1
            passed = time.monotonic() - self._began
            left = passed * (self._count - self._done) / self._done
            line = (
                f"compiling {self._what}: {self._done} of {self._count} files, about {left:.0f} s "
                "left"
            )
            if self._is_terminal:
                self._say(f"{line} ({name})", ends=False)
            report(line)

    def _say(self, line: str, *, ends: bool) -> None:
        begin = "\r\033[K" if self._is_terminal else ""
        print(f"{begin}{line}", end="\n" if ends else "", file=sys.stderr, flush=True)
