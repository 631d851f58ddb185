"""The state of the pooling endpoints, and their metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

from fastapi import Depends

from ...runtime.core.pooling_messages import INPUTS_PER_REQUEST, PoolingInfo
from ...runtime.pooling.folder import PoolingFolder
from ..config.pooling import PoolingServerConfig
from ..core.answers import Answer
from ..core.errors import InvalidRequest
from ..core.limits import Limits
from ..engine.interface import unavailable
from ..observability.metrics import Figure, MetricRegistry
from ..observability.request_record import current_record
from ..serving.state import AnyServing, ModelCard, TextThreads, serving_of
from .client import PoolingClient, Vectors
from .inputs import Input, InputEncoder, pool_requests

_IN_PLACE = 2048  # Up to this many characters, a request is tokenised without a thread.


class PoolingMetrics(MetricRegistry):
    """The metrics of the engine of a pooling model."""

    unit = "Requests of up to 32 inputs"

    def __init__(self, engine: PoolingClient, model_name: str) -> None:
        super().__init__(engine, model_name)
        self._pooling = engine

    def totals(self) -> list[Figure]:
        stats = self._pooling.stats
        return [
            *super().totals(),
            ("num_inputs", "Texts, or pairs, that were computed.", stats.inputs_total),
            ("prompt_tokens", "Tokens of these.", stats.tokens_total),
        ]


class PoolingUsage(Answer):
    """The tokens of all inputs, under both of OpenAI's names."""

    prompt_tokens: int
    total_tokens: int


@dataclass(frozen=True, kw_only=True)
class PoolingServing(AnyServing):
    """The state of a server of a pooling model."""

    purpose = (
        "This server has a model that makes vectors or scores, for POST /v1/embeddings, "
        "/v1/rerank, /v1/score and /v1/classify"
    )
    kind = "pooling"

    engine: PoolingClient
    config: PoolingServerConfig
    metrics: PoolingMetrics
    folder: PoolingFolder
    threads: TextThreads = field(default_factory=TextThreads)

    @property
    def info(self) -> PoolingInfo:
        """The engine's info. Raises `EngineUnavailable` before the engine was first ready."""
        if self.engine.info is None:
            raise unavailable(self.engine)
        return self.engine.info

    @cached_property
    def inputs(self) -> InputEncoder:
        limits = Limits(self.info.context_length, self.info.vocab_size)
        return InputEncoder(
            self.engine.tokenizer,
            limits,
            lower_case=self.folder.lower_case,
            tells_pairs=self.folder.tells_pairs,
        )

    def model_card(self) -> ModelCard:
        card = AnyServing.model_card(self)
        card.max_model_len = self.info.context_length
        return card

    def check_room(self, inputs: int, param: str) -> None:
        """Raise `InvalidRequest`, `QueueFull` or `EngineUnavailable` if inputs do not fit."""
        requests = -(-inputs // INPUTS_PER_REQUEST)
        if requests > self.engine.capacity:
            raise InvalidRequest(
                f"{param}: {inputs} inputs are more than this server's "
                f"{self.engine.capacity * INPUTS_PER_REQUEST}; send several requests.",
                param=param,
                code="too_many_sequences",
            )
        self.engine.require_room(requests)

    async def encode(self, characters: int, work: Callable[[], list[Input]]) -> list[Input]:
        """Call `work`, in a thread if there are many characters."""
        return work() if characters <= _IN_PLACE else await self.threads.run(work)

    async def pool(self, rid: str, inputs: Sequence[Input]) -> Vectors:
        """Return vectors [inputs, size], measured. Raises the errors of `PoolingClient.pool`."""
        metrics, start = self.metrics, time.monotonic()
        requests = pool_requests(rid, inputs)
        ended = False
        if (record := current_record.get()) is not None:
            record.model = self.model_name
            record.input_tokens += sum(len(each.token_ids) for each in inputs)
        try:
            vectors = await self.engine.pool(requests)
            ended = True
            metrics.end_to_end.observe(time.monotonic() - start)
            return vectors
        finally:
            metrics.requests.value += len(requests)
            metrics.aborted.value += 0 if ended else len(requests)


# Parameter of the pooling endpoints.
PoolingServingDep = Annotated[PoolingServing, Depends(serving_of)]
