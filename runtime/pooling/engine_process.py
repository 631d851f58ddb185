"""The engine of a pooling model as a process of its own, see `..engine.process`."""

from __future__ import annotations

from typing import Any

from ..engine.heartbeat import BEAT_MS, Heartbeat
from ..engine.ipc import decode, encode
from ..engine.messages import AbortRequests, FromEngine, Shutdown
from ..executor.forward_context import tell_each_layer
from .config import PoolingConfig
from .messages import PoolingReady, PoolRequest, PoolStep
from .model import PoolingModel
from .scheduler import PoolingScheduler


class PoolingProcess:
    """Receives messages, steps the scheduler, sends what it delivers. Raises `ValueError` that the
    user can mend.
    """

    def __init__(self, config: PoolingConfig, inbox: Any, outbox: Any) -> None:
        self._model = PoolingModel(config)
        self._scheduler = PoolingScheduler(self._model)
        self._inbox, self._outbox = inbox, outbox
        self._running = True
        self._heart = Heartbeat(self._send)
        tell_each_layer(self._heart.beat_again)

    def ready(self) -> PoolingReady:
        return PoolingReady(info=self._model.info())

    def run(self) -> None:
        while self._running:
            busy = self._scheduler.has_work
            self._heart.beat("computing a batch" if busy else "waiting for requests")
            self._receive(0 if busy else BEAT_MS)
            if self._scheduler.has_work:
                self._send(self._scheduler.step())

    def _receive(self, patience: int) -> None:
        """Take every message that is there; `patience`: milliseconds to wait for the first."""
        while self._running and self._inbox.poll(patience):
            self._handle(decode(self._inbox.recv_multipart()))
            patience = 0

    def _handle(self, message: Any) -> None:
        match message:
            case PoolRequest():
                self._scheduler.add(message)
            case AbortRequests(rids=rids):
                self._scheduler.abort(rids)
                # No step may follow: without this the figures would stay as they were.
                self._send(PoolStep(outputs=[], stats=self._scheduler.stats()))
            case Shutdown():
                self._running = False

    def _send(self, message: FromEngine) -> None:
        self._outbox.send_multipart(encode(message))


def build(settings: dict[str, Any], inbox: Any, outbox: Any) -> PoolingProcess:
    """As `process.Build`."""
    return PoolingProcess(PoolingConfig(**settings), inbox, outbox)
