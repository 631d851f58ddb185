"""The engine of a diffusion pipeline. Each rank has the whole pipeline."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ...kernels.platform.detect import detect
from ..core.image_params import DiffusionParams, InvalidParams
from ..core.messages import DiffusionInfo, DiffusionReady, GenerateImage, ImageStep
from ..distributed.processes import start_processes
from ..distributed.ranks import ALONE, Ranks
from ..engine.kind import Work
from ..files.resolve import find_model
from .clock import Clock
from .config import DiffusionConfig
from .model import DiffusionModel, OutOfMemory, check_ranks
from .scheduler import ImageScheduler

logger = logging.getLogger(__name__)


class DiffusionEngine:
    """A pipeline and the scheduler of its images.

    Raise `ValueError` for sizes of `--warmup-resolutions` that the pipeline cannot make.
    """

    expects_step = False  # A step may take minutes, and rank 0 decodes alone.

    def __init__(self, model: DiffusionModel) -> None:
        self._model, self.ranks = model, model.ranks
        self._defaults = model.family.validate(DiffusionParams(prompt="a warm-up", num_frames=1))
        warms_up = model.config.warms_up and model.ranks.rank == 0
        self._warm_up_seconds = self._warm_up() if warms_up else 0.0
        self._scheduler = ImageScheduler(model)

    def ready(self) -> DiffusionReady:
        model, defaults, compiled = self._model, self._defaults, self._model.compiled
        size = (
            (defaults.width, defaults.height)
            if defaults.width is not None and defaults.height is not None
            else None
        )
        info = DiffusionInfo(
            model_path=model.config.model_path,
            architecture=model.architecture,
            dtype=model.dtype,
            device=model.platform.device_type,
            max_running_requests=model.config.batch_size if model.stepwise else 1,
            default_size=size,
            default_steps=defaults.num_inference_steps,
            weight_bytes=model.weight_bytes,
            load_seconds=model.load_seconds,
            warm_up_seconds=self._warm_up_seconds,
            compiled=compiled.summary() if compiled is not None else None,
            remarks=self._model.platform.remarks(),
        )
        return DiffusionReady(info=info)

    def connect(self, beat: Callable[[], None], pause: Callable[[], None]) -> None:
        self._scheduler.between_steps = pause
        if self._model.compiled is None:
            # With compiled models, the hook would be compiled too.
            self._model.call_on_each_block(beat)

    def work(self) -> Work | None:
        may_build = self._model.compiled is not None
        return Work("making images", may_build) if self._scheduler.has_work else None

    def handle(self, message: Any) -> tuple[()]:
        if isinstance(message, GenerateImage):
            self._scheduler.add(message)
        return ()

    def abort(self, rids: list[str]) -> None:
        self._scheduler.abort(rids)

    def step(self) -> Iterator[ImageStep]:
        if self._scheduler.has_work:
            yield self._scheduler.step()

    def report(self) -> ImageStep:
        return self._scheduler.take()

    def give_back_memory(self) -> None:
        self._model.give_back_memory()

    def close(self) -> None:
        pass

    @property
    def calls(self) -> Mapping[str, Callable[..., Any]]:
        def generate(params: list[DiffusionParams]) -> None:
            self._model.generate(params, Clock(self._model.platform), lambda done, total: None)

        return {
            "generate": generate,
            "add": self._scheduler.add,
            "abort": self._scheduler.abort,
            "step": self._scheduler.step,
            "give_back_memory": self._model.give_back_memory,
        }

    def _warm_up(self) -> float:
        """Warm up every size of image and batch, because `torch.compile` may compile each. Return
        the seconds.
        """
        counts = range(1, self._model.config.batch_size + 1 if self._model.stepwise else 2)
        seconds = 0.0
        for width, height in self._model.config.warmup_sizes:
            asked = replace(
                self._defaults,
                width=width or self._defaults.width,
                height=height or self._defaults.height,
            )
            try:
                self._model.check_area(asked)
                seconds += sum(self._model.warm_up(asked, count) for count in counts)
            except InvalidParams as error:
                raise ValueError(f"--warmup-resolutions: {error}") from None
            except OutOfMemory:
                if self._model.ranks.size > 1:
                    raise
                logger.warning(
                    "no memory to warm up %sx%s; smaller images may fit", asked.width, asked.height
                )
        if self._model.compiled is not None:
            self._model.compiled.settle(anew=True)
        return seconds


def start_ranks(settings: dict[str, Any], when_lost: Callable[[str], None] | None = None) -> Ranks:
    """Start the other ranks. `when_lost` is that of `distributed.processes.start_ranks`.

    Raise `ValueError` if the machine or the pipeline does not support the number of ranks.
    """
    config = DiffusionConfig(**settings)
    if config.num_ranks == 1:
        return ALONE
    check_ranks(Path(find_model(config.model_path)), config.num_ranks)
    detect(config.device).check_ranks(config.num_ranks)
    return start_processes(
        __name__, asdict(config), config.num_ranks, when_lost, seconds=config.dist_timeout
    )


def build(settings: dict[str, Any], ranks: Ranks) -> DiffusionEngine:
    return DiffusionEngine(DiffusionModel(DiffusionConfig(**settings), ranks))
