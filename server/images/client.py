"""The client of a diffusion pipeline's engine: sends requests and returns images."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Unpack

from ...runtime.core.generation import FinishReason
from ...runtime.core.messages import (
    DiffusionInfo,
    GenerateImage,
    ImageOutput,
    ImageStats,
    ImageStep,
)
from ...runtime.diffusion.config import DiffusionConfig
from ..engine.results import Job, ResultClient
from ..engine.settings import SupervisorSettings
from ..engine.spawn import DIFFUSION_PIPELINE


class ImageJob(Job[GenerateImage, ImageOutput]):
    """One image.

    `progress` holds the finished and all denoising steps, or (0, 0) before the first.
    """

    def __init__(self, request: GenerateImage) -> None:
        super().__init__(request)
        self.arrival_time = time.monotonic()
        self.progress = (0, 0)

    def end(self, reason: FinishReason, error: str | None) -> None:
        self.take(ImageOutput(rid=self.rid, finish_reason=reason, error=error))

    def take(self, output: ImageOutput) -> None:
        if not self.result.done():
            self.result.set_result(output)


class ImageClient(ResultClient[ImageJob]):
    """A supervised diffusion engine. After a crash, images are made again from their seeds."""

    def __init__(
        self,
        config: DiffusionConfig,
        *,
        command: Sequence[str] = DIFFUSION_PIPELINE,
        **settings: Unpack[SupervisorSettings],
    ) -> None:
        """`settings` are the keyword arguments of `EngineSupervisor`."""
        super().__init__(command, config, **settings)
        self.info: DiffusionInfo | None = None
        self.stats = ImageStats()

    async def generate(self, request: GenerateImage) -> ImageOutput:
        """Return the image or error of a request. Raises as `ResultClient`."""
        output: ImageOutput
        (output,) = await self._results([ImageJob(request)])
        return output

    def _handle(self, message: Any) -> None:
        if isinstance(message, ImageStep):
            for rid, steps in message.progress.items():
                if rid in self._requests:
                    self._requests[rid].progress = steps
        super()._handle(message)
