"""The engine of a diffusion pipeline in a separate process, see `..process`."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from ...kernels.collectives import CollectiveError
from ..core.image_params import DiffusionParams, InvalidParams
from ..core.messages import AbortRequests, DiffusionInfo, DiffusionReady, GenerateImage, ImageStep
from ..distributed.ranks import RankError
from ..process.heartbeat import Heartbeat
from ..process.mailbox import Mailbox
from .config import DiffusionConfig
from .model import DiffusionModel, OutOfMemory
from .rank_process import start_ranks
from .scheduler import ImageScheduler

logger = logging.getLogger(__name__)


class DiffusionProcess:
    """Receives messages, steps the scheduler and sends its results. Raises `ValueError` for faults
    that the user can repair.
    """

    def __init__(self, config: DiffusionConfig, mailbox: Mailbox) -> None:
        self._model = DiffusionModel(config, start_ranks(config))
        self._defaults = self._model.family.validate(
            DiffusionParams(prompt="a warm-up", num_frames=1)
        )
        self._warm_up_seconds = self._warm_up() if config.warms_up else 0.0
        self._scheduler = ImageScheduler(self._model, self._between_steps)
        self._mailbox = mailbox
        self._heart = Heartbeat(mailbox.send)
        if self._model.compiled is None:
            # A step may take minutes, so each block reports. With compiled models, the hook would
            # be compiled too.
            self._model.call_on_each_block(self._heart.beat_again)

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

    def run(self) -> None:
        """Run until the mailbox is closed. Raise `SystemExit` if the ranks cannot continue
        together.
        """
        ranks = self._model.ranks
        try:
            self._loop()
        except (RankError, CollectiveError) as error:
            logger.error("the engine's %d ranks end: %s", ranks.size, error)
            raise SystemExit(1) from None
        finally:
            ranks.close()

    def _loop(self) -> None:
        while self._mailbox.is_open:
            if self._scheduler.has_work:
                self._beat()
            else:
                self._heart.wait(self._mailbox.waits, self._model.give_back_memory)
            self._receive()
            if self._scheduler.has_work:
                self._mailbox.send(self._scheduler.step())

    def _warm_up(self) -> float:
        """Warm up every size of image and batch, because `torch.compile` may compile each. Return
        the seconds.

        Raise `ValueError` for a size that the pipeline cannot make.
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

    def _between_steps(self) -> None:
        """Receive and send between two denoising steps of an image that the scheduler makes in one
        step.
        """
        self._beat()
        self._receive()
        self._mailbox.send(self._scheduler.take())

    def _beat(self) -> None:
        self._heart.beat("making images", may_build=self._model.compiled is not None)

    def _receive(self) -> None:
        """Handle every message that has arrived."""
        for message in self._mailbox.received(0):
            self._handle(message)

    def _handle(self, message: Any) -> None:
        match message:
            case GenerateImage():
                self._scheduler.add(message)
            case AbortRequests(rids=rids):
                self._scheduler.abort(rids)
                # No step may follow, so send the statistics now.
                self._mailbox.send(ImageStep(outputs=[], stats=self._scheduler.stats()))


def build(settings: dict[str, Any], mailbox: Mailbox) -> DiffusionProcess:
    """See `process.Build`."""
    return DiffusionProcess(DiffusionConfig(**settings), mailbox)
