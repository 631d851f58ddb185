"""Measures the phases of an engine's start."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from ...kernels.build_progress import report


class StartClock:
    """`seconds` of each phase of a start, in the order in which the phases began."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to the phase `name`, and report that it begins."""
        report(f"preparing {name}")
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - began)

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
