"""The client of a diffusion pipeline's engine: sends requests and returns images."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Unpack

from ...runtime.core.generation import FinishReason
from ...runtime.core.messages import (
    DiffusionInfo,
    DiffusionReady,
    GenerateImage,
    ImageOutput,
    ImageStats,
    ImageStep,
)
from ...runtime.diffusion.config import DiffusionConfig
from ..engine.spawn import DIFFUSION_PIPELINE
from ..engine.supervisor import EngineSupervisor, SupervisorSettings


class ImageJob:
    """One request of this process.

    It is never `delivered`, because its image arrives all at once: until then it may be the cause
    of a crash. `progress` holds the finished and all denoising steps, or (0, 0) before the first.
    """

    delivered = False

    def __init__(self, request: GenerateImage) -> None:
        self.rid = request.rid
        self.arrival_time = time.monotonic()
        self.progress = (0, 0)
        self._request = request
        self.result: asyncio.Future[ImageOutput] = asyncio.get_running_loop().create_future()

    def goes_by(self, rid: str) -> bool:
        return rid == self.rid

    def to_message(self) -> GenerateImage:
        return self._request

    def end(self, reason: FinishReason, error: str | None) -> None:
        self.take(ImageOutput(rid=self.rid, finish_reason=reason, error=error))

    def take(self, output: ImageOutput) -> None:
        if not self.result.done():
            self.result.set_result(output)


class ImageClient(EngineSupervisor[ImageJob]):
    """A supervised diffusion engine.

    After a crash, unfinished images are generated again from their seeds, one at a time.
    """

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
        """Return the image or error of a request.

        Cancelling aborts the request at the engine's next step. Raises `QueueFull` and
        `EngineUnavailable`.
        """
        job = ImageJob(request)
        self.add_request(job)
        try:
            return await job.result
        finally:
            self.drop([job])

    def _handle(self, message: Any) -> None:
        match message:
            case ImageStep(outputs=outputs, stats=stats, progress=progress):
                self.stats = stats
                for rid, steps in progress.items():
                    if rid in self._requests:
                        self._requests[rid].progress = steps
                ended = [output for output in outputs if output.rid in self._requests]
                for output in ended:
                    self._requests[output.rid].take(output)
                self._after_step(outputs, [output.rid for output in ended], [])
            case DiffusionReady(info=info):
                self._became_ready(info)
            case _:
                super()._handle(message)
