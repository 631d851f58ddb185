"""Measure stages and denoising steps. The device is idle at the start and end of each
measurement.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

from ...kernels.platform.memory import Memory, MemoryUse


class Stage(StrEnum):
    """The stages in order, by the names in SGLang's reports."""

    INPUT_VALIDATION = "InputValidationStage"
    TEXT_ENCODING = "TextEncodingStage"
    LATENT_PREPARATION = "LatentPreparationStage"
    TIMESTEP_PREPARATION = "TimestepPreparationStage"
    DENOISING = "DenoisingStage"
    DECODING = "DecodingStage"


class Clock:
    """Milliseconds of each stage and step, and the memory used after each stage."""

    def __init__(self, platform: Memory) -> None:
        self._platform = platform
        self.stages: dict[Stage, float] = dict.fromkeys(Stage, 0.0)
        self.steps: list[float] = []
        self.memory: dict[Stage, MemoryUse] = {}

    @contextmanager
    def stage(self, stage: Stage) -> Iterator[None]:
        """Add the time of the block to `stage`."""
        start = self._now()
        try:
            yield
        finally:
            self.stages[stage] += self._now() - start
            self.memory[stage] = self._platform.memory_use()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure a denoising step. It counts for its stage too."""
        with self.stage(Stage.DENOISING):
            start = self._now()
            yield
            self.steps.append(self._now() - start)

    def _now(self) -> float:
        self._platform.synchronize()
        return time.perf_counter() * 1000
