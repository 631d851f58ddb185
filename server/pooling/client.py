"""The client of a pooling model's engine: sends requests and returns vectors."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np

from ...runtime.core.generation import FinishReason
from ...runtime.core.pooling_messages import (
    PoolingInfo,
    PoolingReady,
    PoolOutput,
    PoolRequest,
    PoolStats,
    PoolStep,
)
from ...runtime.pooling.config import PoolingConfig
from ...runtime.tokenizer.tokenizer import Tokenizer
from ..core.errors import InternalError
from ..engine.spawn import POOLING_MODEL
from ..engine.state import EngineUnavailable
from ..engine.supervisor import EngineSupervisor, SupervisorSettings

Vectors = np.ndarray[Any, np.dtype[np.float32]]


class _Job:
    """One request of this process.

    It is never `delivered`, because its vectors arrive all at once: until then it may be the cause
    of a crash.
    """

    delivered = False

    def __init__(self, request: PoolRequest) -> None:
        self.rid = request.rid
        self._request = request
        self.result: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def goes_by(self, rid: str) -> bool:
        return rid == self.rid

    def to_message(self) -> PoolRequest:
        return self._request

    def end(self, reason: FinishReason, error: str | None) -> None:
        if self.result.done():
            return
        if reason is FinishReason.ABORT:
            self.result.set_exception(EngineUnavailable("the server is stopping"))
        else:
            message = f"The engine could not finish the request: {error}."
            self.result.set_exception(InternalError(message, code="engine_error"))
        # Retrieve the exception: the reader may be gone or have read the error of another job.
        self.result.exception()

    def take(self, output: PoolOutput) -> None:
        if output.error is not None:
            self.end(FinishReason.ERROR, output.error)
        elif not self.result.done():
            self.result.set_result(output.vectors)


class PoolingClient(EngineSupervisor[_Job]):
    """A supervised engine process of a pooling model.

    After a crash, unfinished requests are computed again, one at a time.
    """

    def __init__(
        self,
        config: PoolingConfig,
        tokenizer: Tokenizer,
        *,
        command: Sequence[str] = POOLING_MODEL,
        **settings: Unpack[SupervisorSettings],
    ) -> None:
        """`settings` are the keyword arguments of `EngineSupervisor`."""
        super().__init__(command, config, **settings)
        self.info: PoolingInfo | None = None
        self.stats = PoolStats()
        self.tokenizer = tokenizer

    async def pool(self, requests: Sequence[PoolRequest]) -> Vectors:
        """Return vectors [inputs of all requests, size].

        Cancelling aborts the requests at the engine's next step. Raises `QueueFull`,
        `EngineUnavailable` and `InternalError`.
        """
        self.require_room(len(requests))
        jobs = [_Job(request) for request in requests]
        try:
            for job in jobs:
                self.add_request(job)
            parts = [await job.result for job in jobs]
        finally:
            self.drop(jobs)
        assert self.info is not None
        return np.frombuffer(b"".join(parts), "<f4").reshape(-1, self.info.size)

    def _handle(self, message: Any) -> None:
        match message:
            case PoolStep(outputs=outputs, stats=stats):
                self.stats = stats
                ended = [output for output in outputs if output.rid in self._requests]
                for output in ended:
                    self._requests[output.rid].take(output)
                self._after_step(outputs, [output.rid for output in ended], [])
            case PoolingReady(info=info):
                self._became_ready(info)
            case _:
                super()._handle(message)
