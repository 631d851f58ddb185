"""Models of the answers of SGLang's native endpoints, for `/openapi.json`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from ..core.answers import Answer

Triple = tuple[float | None, int, str | None]  # Log-probability, token id, text or null.


class StoppedBy(Answer):
    type: Literal["stop"]
    matched: str | int | None


class ReachedLength(Answer):
    type: Literal["length"]
    length: int


class Aborted(Answer):
    type: Literal["abort"]
    message: str


class MetaInfo(Answer):
    """The latency is set at the end. Log-probabilities are set if the request asks for them."""

    id: str
    finish_reason: StoppedBy | ReachedLength | Aborted | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    e2e_latency: float = 0.0
    input_token_logprobs: list[Triple] = Field(default_factory=list)
    output_token_logprobs: list[Triple] = Field(default_factory=list)
    input_top_logprobs: list[list[Triple] | None] = Field(default_factory=list)
    output_top_logprobs: list[list[Triple] | None] = Field(default_factory=list)


class Generated(Answer):
    text: str
    output_ids: list[int]
    meta_info: MetaInfo


class GeneratedSoFar(Generated):
    """`index` is the number of the sequence, if there are several."""

    index: int = 0


class ModelInfo(Answer):
    model_path: str
    tokenizer_path: str
    is_generation: bool
    preferred_sampling_params: dict[str, float]
    architecture: str
    context_length: int
    vocab_size: int


class ServerInfo(Answer):
    """Every setting, and these members."""

    model_config = ConfigDict(extra="allow")

    version: str
    status: str
    context_length: int
    default_sampling_params: dict[str, float]
    internal_states: list[dict[str, Any]]


class Load(Answer):
    dp_rank: int
    num_reqs: int
    num_waiting_reqs: int
    num_tokens: int


class ReplicaLoad(Answer):
    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float
    cache_hit_rate: float
    max_running_requests: int


class TotalLoad(Answer):
    total_running_reqs: int
    total_waiting_reqs: int
    total_reqs: int
    avg_token_usage: float


class Loads(Answer):
    timestamp: str
    version: str
    dp_rank_count: int
    loads: list[ReplicaLoad]
    aggregate: TotalLoad


class CacheFlush(Answer):
    success: bool
    freed_tokens: int


class AbortCount(Answer):
    aborted: int
