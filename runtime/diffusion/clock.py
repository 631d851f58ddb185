"""Times stages and denoising steps, each from an idle device to an idle device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

from ...kernels.platform import MemoryUse, Platform


class Stage(StrEnum):
    """The stages in their order, under the names that SGLang's reports have."""

    INPUT_VALIDATION = "InputValidationStage"
    TEXT_ENCODING = "TextEncodingStage"
    LATENT_PREPARATION = "LatentPreparationStage"
    TIMESTEP_PREPARATION = "TimestepPreparationStage"
    DENOISING = "DenoisingStage"
    DECODING = "DecodingStage"


class Clock:
    """Milliseconds of each stage and step, and the memory that was in use after each stage."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self.stages: dict[Stage, float] = dict.fromkeys(Stage, 0.0)
        self.steps: list[float] = []
        self.memory: dict[Stage, MemoryUse] = {}

    @contextmanager
    def stage(self, stage: Stage) -> Iterator[None]:
        """Add what runs inside to `stage`."""
        start = self._now()
        try:
            yield
        finally:
            self.stages[stage] += self._now() - start
            self.memory[stage] = self._platform.memory_use()

    @contextmanager
    def step(self) -> Iterator[None]:
        """A denoising step, which counts for its stage too."""
        with self.stage(Stage.DENOISING):
            start = self._now()
            yield
            self.steps.append(self._now() - start)

    def _now(self) -> float:
        self._platform.synchronize()
        return time.perf_counter() * 1000
