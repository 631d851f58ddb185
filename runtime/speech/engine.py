"""The engine of a speech model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ..core.forward_context import call_on_each_layer
from ..core.speech_messages import SpeechReady, SpeechRequest, SpeechStep
from ..distributed.ranks import ALONE, Ranks
from ..engine.kind import Work
from .config import SpeechConfig
from .model import SpeechModel
from .scheduler import SpeechScheduler


class SpeechEngine:
    """A model and the scheduler of its windows. There is one rank."""

    ranks: Ranks = ALONE

    def __init__(self, model: SpeechModel) -> None:
        self._model, self._scheduler = model, SpeechScheduler(model)

    def ready(self) -> SpeechReady:
        return SpeechReady(info=self._model.info())

    def connect(self, beat: Callable[[], None], pause: Callable[[], None]) -> None:
        call_on_each_layer(beat)

    def work(self) -> Work | None:
        return Work("writing text of speech") if self._scheduler.has_work else None

    def handle(self, message: Any) -> tuple[()]:
        if isinstance(message, SpeechRequest):
            self._scheduler.add(message)
        return ()

    def abort(self, rids: list[str]) -> None:
        self._scheduler.abort(rids)

    def step(self) -> Iterator[SpeechStep]:
        if self._scheduler.has_work:
            yield self._scheduler.step()

    def report(self) -> SpeechStep:
        return SpeechStep(outputs=[], stats=self._scheduler.stats())

    def give_back_memory(self) -> None:
        self._model.platform.give_back_memory()

    def close(self) -> None:
        pass


def start_ranks(settings: dict[str, Any]) -> Ranks:
    return ALONE


def build(settings: dict[str, Any], ranks: Ranks) -> SpeechEngine:
    return SpeechEngine(SpeechModel(SpeechConfig(**settings)))
