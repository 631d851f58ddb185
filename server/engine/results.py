"""Clients of engines that answer each request with one result: an image, vectors, or
text of speech.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from ...runtime.core.generation import FinishReason
from ...runtime.core.messages import DiffusionReady, GenerateImage, ImageStep
from ...runtime.core.pooling_messages import PoolingReady, PoolRequest, PoolStep
from ...runtime.core.speech_messages import SpeechReady, SpeechRequest, SpeechStep
from .supervisor import EngineSupervisor

M = TypeVar("M", bound=GenerateImage | PoolRequest | SpeechRequest)
T = TypeVar("T")


class Job(Generic[M, T]):
    """A request whose result arrives at once.

    It is never `delivered`: until its result arrives, it may be the cause of a crash.
    """

    delivered = False

    def __init__(self, request: M) -> None:
        self.rid = request.rid
        self.result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._request = request

    def goes_by(self, rid: str) -> bool:
        return rid == self.rid

    def to_message(self) -> M:
        return self._request

    @abstractmethod
    def end(self, reason: FinishReason, error: str | None) -> None: ...

    @abstractmethod
    def take(self, output: Any) -> None:
        """Set the result, unless there is one."""


J = TypeVar("J", bound=Job[Any, Any])


class ResultClient(EngineSupervisor[J]):
    """A supervised engine whose requests have one result each.

    After a crash, unfinished requests are computed again, one at a time.
    """

    async def _results(self, jobs: Sequence[J]) -> list[Any]:
        """Return the results of requests.

        Cancelling aborts the requests at the engine's next step. Raises `QueueFull`,
        `EngineUnavailable` and the errors of the results.
        """
        self.require_room(len(jobs))
        try:
            for job in jobs:
                self.add_request(job)
            return [await job.result for job in jobs]
        finally:
            self.drop(jobs)

    def _handle(self, message: Any) -> None:
        match message:
            case (
                ImageStep(outputs=outputs) | PoolStep(outputs=outputs) | SpeechStep(outputs=outputs)
            ):
                self.stats = message.stats
                ended = [output for output in outputs if output.rid in self._requests]
                for output in ended:
                    self._requests[output.rid].take(output)
                self._after_step(outputs, [output.rid for output in ended], [])
            case DiffusionReady(info=info) | PoolingReady(info=info) | SpeechReady(info=info):
                self._became_ready(info)
            case _:
                super()._handle(message)
