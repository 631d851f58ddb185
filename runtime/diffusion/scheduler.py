"""Choose the next image to work on: requests in their order, a few at a time, those of one shape
denoised together.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from ..core.generation import FinishReason
from ..core.image_params import InvalidParams
from ..core.messages import GenerateImage, ImageOutput, ImageStats, ImageStep
from .clock import Clock
from .family import Family
from .media import to_bytes
from .model import DiffusionModel, OutOfMemory
from .state import State
from .whole_pipeline import WholePipeline

logger = logging.getLogger(__name__)
_Shape = tuple[int | None, ...]


class _Job:
    """A request and its state, from its validation on.

    Attributes:
        alone: Denoise it alone, because a step with others failed.
        reported: Progress of an image that diffusers' pipeline call makes.
    """

    def __init__(self, rid: str, state: State) -> None:
        self.rid = rid
        self.state = state
        self.alone = False
        self.reported = (0, 0)

    @property
    def progress(self) -> tuple[int, int]:
        """Denoising steps done, and all steps. 0 of 0 while that is unknown."""
        if self.state.timesteps is None:
            return self.reported
        return self.state.step, self.state.num_steps


class _Aborted(Exception):
    """The request of the image that is being made was aborted."""


class ImageScheduler:
    """Works on up to `--max-batch-size` images. The others wait in the order of their arrival.

    Each `step` does one piece of work, and requests may be added or aborted between two of them:
    prepare the next image, run one denoising step of all images of one shape, or decode one image.
    Shapes take turns. Pipelines that run as a whole make one image per step. Before each of its
    denoising steps `between_steps` is called, which may add and abort requests.

    An error of the pipeline ends only the image for which it was raised. An error of a broken
    device is raised.
    """

    def __init__(self, model: DiffusionModel) -> None:
        self._model = model
        self.between_steps: Callable[[], None] = lambda: None
        self._waiting: deque[_Job] = deque()
        self._running: list[_Job] = []
        self._outputs: list[ImageOutput] = []
        # Shapes that the device has no memory to denoise together.
        self._alone: set[_Shape] = set()
        self._steps = 0
        self._images = 0
        self._seconds: dict[str, float] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._outputs)

    def add(self, request: GenerateImage) -> None:
        """Add a request. If the pipeline cannot serve it, the next step returns the error."""
        self._model.ranks.call("add", request)
        clock = Clock(self._model.platform)
        try:
            state = self._model.validate(request.params, clock)
            self._model.check_area(state.params)
            self._waiting.append(_Job(request.rid, state))
        except Exception as error:
            self._outputs.append(self._failure(request.rid, error))
        self._count(clock)

    def abort(self, rids: list[str]) -> None:
        """Drop these requests. Unknown ids are ignored."""
        self._model.ranks.call("abort", rids)
        gone = set(rids)
        self._waiting = deque(job for job in self._waiting if job.rid not in gone)
        self._running = [job for job in self._running if job.rid not in gone]

    def step(self) -> ImageStep:
        """Do one piece of work, and return the outputs that are ready."""
        self._model.ranks.call("step")
        clock = Clock(self._model.platform)
        if not self._outputs:
            self._work(clock)
        self._count(clock)
        return self.take()

    def take(self) -> ImageStep:
        """Return outputs that were not returned yet."""
        outputs, self._outputs = self._outputs, []
        progress = {job.rid: job.progress for job in self._running}
        return ImageStep(outputs=outputs, stats=self.stats(), progress=progress)

    def stats(self) -> ImageStats:
        compiled = self._model.compiled
        return ImageStats(
            running_requests=len(self._running),
            queued_requests=len(self._waiting),
            steps_total=self._steps,
            images_total=self._images,
            recompiles_total=compiled.recompiles if compiled is not None else 0,
            stage_seconds_total=dict(self._seconds),
        )

    def _work(self, clock: Clock) -> None:
        if isinstance(self._model.family, WholePipeline):
            self._make_whole(self._waiting.popleft(), self._model.family, clock)
        elif done := next((job for job in self._running if job.state.denoised), None):
            self._decode(done, clock)
        elif self._waiting and len(self._running) < self._model.config.batch_size:
            self._prepare(self._waiting.popleft(), clock)
        elif self._running:
            self._denoise(self._next_batch(), clock)

    def _prepare(self, job: _Job, clock: Clock) -> None:
        self._running.append(job)
        try:
            self._model.prepare(job.state, clock)
        except Exception as error:
            self._finish(job, self._failure(job.rid, error))

    def _next_batch(self) -> list[_Job]:
        """Return the images of the shape whose turn it is, and move them to the end of
        the queue.
        """
        assert isinstance(self._model.family, Family)
        first = self._running[0]
        shape = first.state.shape
        together = [job for job in self._running if job.state.shape == shape and not job.alone]
        batch = [first] if first.alone or shape in self._alone else together
        self._running = [job for job in self._running if job not in batch] + batch
        return batch

    def _denoise(self, batch: list[_Job], clock: Clock) -> None:
        try:
            self._model.denoise([job.state for job in batch], clock)
        except Exception as error:
            if len(batch) == 1 or self._model.ranks.size > 1:
                self._finish(batch[0], self._failure(batch[0].rid, error))
            elif isinstance(error, OutOfMemory):
                logger.warning(
                    "no memory to denoise %d images together; images of this size are made one at "
                    "a time from now on",
                    len(batch),
                )
                self._alone.add(batch[0].state.shape)
            else:
                self._model.platform.synchronize()
                logger.warning(
                    "a step of %d images together failed, so they continue one at a time",
                    len(batch),
                    exc_info=error,
                )
                for job in batch:
                    job.alone = True
        else:
            self._steps += 1

    def _decode(self, job: _Job, clock: Clock) -> None:
        try:
            self._model.decode(job.state, clock)
            self._finish(job, self._image(job))
        except Exception as error:
            self._finish(job, self._failure(job.rid, error))

    def _make_whole(self, job: _Job, family: WholePipeline, clock: Clock) -> None:
        self._running = [job]

        def watch(done: int, total: int) -> None:
            self._steps += 1
            job.reported = (done, total)
            self.between_steps()
            if job not in self._running:
                raise _Aborted

        try:
            self._model.make_whole(family, job.state, clock, watch)
            self._finish(job, self._image(job))
        except _Aborted:
            pass
        except Exception as error:
            self._finish(job, self._failure(job.rid, error))

    def _failure(self, rid: str, error: Exception) -> ImageOutput:
        """Return the output for an error of one image. Raise the error of the device if the device
        is broken.
        """
        if isinstance(error, InvalidParams):
            return _refusal(rid, error)
        if self._model.ranks.size > 1:
            # The other ranks may not have failed, and would continue without this rank.
            raise error
        if isinstance(error, OutOfMemory):
            return _refusal(rid, error)
        self._model.platform.synchronize()
        logger.error("an image could not be made", exc_info=error)
        return ImageOutput(
            rid=rid,
            finish_reason=FinishReason.ERROR,
            error=f"the pipeline failed with {type(error).__name__}",
        )

    def _finish(self, job: _Job, output: ImageOutput) -> None:
        """Finish a job, unless its request was aborted."""
        if job in self._running:
            self._running.remove(job)
            self._outputs.append(output)

    def _image(self, job: _Job) -> ImageOutput:
        assert job.state.pixels is not None
        self._images += 1
        image = to_bytes(job.state.pixels[0])
        height, width, _ = image.shape
        return ImageOutput(
            rid=job.rid,
            finish_reason=FinishReason.STOP,
            pixels=image.tobytes(),
            width=width,
            height=height,
            warnings=job.state.warnings,
        )

    def _count(self, clock: Clock) -> None:
        for stage, milliseconds in clock.stages.items():
            self._seconds[str(stage)] = self._seconds.get(str(stage), 0.0) + milliseconds / 1000


def _refusal(rid: str, error: InvalidParams | OutOfMemory) -> ImageOutput:
    param, code = (
        (error.param, "invalid_value")
        if isinstance(error, InvalidParams)
        else ("size", "out_of_memory")
    )
    return ImageOutput(
        rid=rid, finish_reason=FinishReason.ERROR, error=str(error), param=param, code=code
    )
