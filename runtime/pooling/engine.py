"""The engine of a pooling model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ..core.forward_context import call_on_each_layer
from ..core.pooling_messages import PoolingReady, PoolRequest, PoolStep
from ..distributed.ranks import ALONE, Ranks
from ..engine.kind import Work
from .config import PoolingConfig
from .model import PoolingModel
from .scheduler import PoolingScheduler


class PoolingEngine:
    """A model and the scheduler of its batches. There is one rank."""

    ranks: Ranks = ALONE

    def __init__(self, model: PoolingModel) -> None:
        self._model, self._scheduler = model, PoolingScheduler(model)

    def ready(self) -> PoolingReady:
        return PoolingReady(info=self._model.info())

    def connect(self, beat: Callable[[], None], pause: Callable[[], None]) -> None:
        call_on_each_layer(beat)

    def work(self) -> Work | None:
        return Work("computing a batch") if self._scheduler.has_work else None

    def handle(self, message: Any) -> tuple[()]:
        if isinstance(message, PoolRequest):
            self._scheduler.add(message)
        return ()

    def abort(self, rids: list[str]) -> None:
        self._scheduler.abort(rids)

    def step(self) -> Iterator[PoolStep]:
        if self._scheduler.has_work:
            yield self._scheduler.step()

    def report(self) -> PoolStep:
        return PoolStep(outputs=[], stats=self._scheduler.stats())

    def give_back_memory(self) -> None:
        self._model.platform.give_back_memory()

    def close(self) -> None:
        pass


def start_ranks(settings: dict[str, Any]) -> Ranks:
    return ALONE


def build(settings: dict[str, Any], ranks: Ranks) -> PoolingEngine:
    return PoolingEngine(PoolingModel(PoolingConfig(**settings)))
