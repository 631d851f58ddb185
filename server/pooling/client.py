"""The client of a pooling model's engine: sends requests and returns vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np

from ...runtime.core.pooling_messages import PoolingInfo, PoolOutput, PoolRequest, PoolStats
from ...runtime.pooling.config import PoolingConfig
from ...runtime.tokenizer.tokenizer import Tokenizer
from ..engine.results import ResultClient
from ..engine.settings import SupervisorSettings
from ..engine.spawn import POOLING_MODEL
from ..serving.raising_job import RaisingJob

Vectors = np.ndarray[Any, np.dtype[np.float32]]


class _Job(RaisingJob[PoolRequest, bytes]):
    """The vectors of some inputs."""

    def value(self, output: PoolOutput) -> bytes:
        return output.vectors


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
