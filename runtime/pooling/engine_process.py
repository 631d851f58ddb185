"""The engine of a pooling model in its own process. See `engine.process`."""

from __future__ import annotations

from typing import Any

from ..core.forward_context import call_on_each_layer
from ..core.messages import AbortRequests
from ..core.pooling_messages import PoolingReady, PoolRequest, PoolStep
from ..process.heartbeat import Heartbeat
from ..process.mailbox import Mailbox
from .config import PoolingConfig
from .model import PoolingModel
from .scheduler import PoolingScheduler


class PoolingProcess:
    """Receives messages, runs the scheduler and sends the results. Raises `ValueError` with a
    remedy.
    """

    def __init__(self, config: PoolingConfig, mailbox: Mailbox) -> None:
        self._model = PoolingModel(config)
        self._scheduler = PoolingScheduler(self._model)
        self._mailbox = mailbox
        self._heart = Heartbeat(mailbox.send)
        call_on_each_layer(self._heart.beat_again)

    def ready(self) -> PoolingReady:
        return PoolingReady(info=self._model.info())

    def run(self) -> None:
        while self._mailbox.is_open:
            if self._scheduler.has_work:
                self._heart.beat("computing a batch")
            else:
                self._heart.wait(self._mailbox.waits, self._model.platform.give_back_memory)
            for message in self._mailbox.received(0):
                self._handle(message)
            if self._scheduler.has_work:
                self._mailbox.send(self._scheduler.step())

    def _handle(self, message: Any) -> None:
        match message:
            case PoolRequest():
                self._scheduler.add(message)
            case AbortRequests(rids=rids):
                self._scheduler.abort(rids)
                # If no step follows, the figures would otherwise stay outdated.
                self._mailbox.send(PoolStep(outputs=[], stats=self._scheduler.stats()))


def build(settings: dict[str, Any], mailbox: Mailbox) -> PoolingProcess:
    """Build the process. See `engine.process.Build`."""
    return PoolingProcess(PoolingConfig(**settings), mailbox)
