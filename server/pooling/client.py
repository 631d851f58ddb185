"""The client of a pooling model's engine: sends requests and returns vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np

from ...runtime.core.generation import FinishReason
from ...runtime.core.pooling_messages import PoolingInfo, PoolOutput, PoolRequest, PoolStats
from ...runtime.pooling.config import PoolingConfig
from ...runtime.tokenizer.tokenizer import Tokenizer
from ..core.errors import InternalError
from ..engine.results import Job, ResultClient
from ..engine.settings import SupervisorSettings
from ..engine.spawn import POOLING_MODEL
from ..engine.state import EngineUnavailable

Vectors = np.ndarray[Any, np.dtype[np.float32]]


class _Job(Job[PoolRequest, bytes]):
    """The vectors of some inputs."""

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


class PoolingClient(ResultClient[_Job]):
    """A supervised engine process of a pooling model."""

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
        """Return vectors [inputs of all requests, size]. Raises as `ResultClient`."""
        parts = await self._results([_Job(request) for request in requests])
        assert self.info is not None
        return np.frombuffer(b"".join(parts), "<f4").reshape(-1, self.info.size)
