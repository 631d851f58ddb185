"""What the web process and the engine of a pooling model tell each other; `engine.messages` names
them among all.
"""

from __future__ import annotations

from dataclasses import dataclass, field

INPUTS_PER_REQUEST = 32
"""Most inputs of one `PoolRequest`: a client's request becomes several, and others run between."""
NO_ADAPTER = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRequest:
    """Make a vector, or a score, of each input.

    `token_ids`: those of all inputs, one after another, 4 bytes each, little-endian. `lengths`:
    tokens of each input, at least 1. `firsts`: of pairs, how many of these belong to the first
    text; empty where no input is a pair. `adapters`: the number of each input's adapter, or
    `NO_ADAPTER`; empty where no input has one.
    """

    rid: str
    token_ids: bytes
    lengths: list[int]
    firsts: list[int] = field(default_factory=list)
    adapters: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOutput:
    """How a `PoolRequest` ended. `vectors`: of its inputs in order, float32, little-endian, each of
    `PoolingInfo.size` numbers. `error` says why there are none.
    """

    rid: str
    vectors: bytes = b""
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """Gauges at one moment and totals since the engine process began."""

    running_requests: int = 0
    queued_requests: int = 0
    steps_total: int = 0
    inputs_total: int = 0
    tokens_total: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStep:
    """What has ended since the last message, and the figures."""

    outputs: list[PoolOutput]
    stats: PoolStats


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingInfo:
    """What a ready engine of a pooling model is. Sizes in tokens, memory in bytes.

    `task`: embed or classify. `size`: numbers of a vector, 1 of a score. `labels`: what the numbers
    of a classifier are of. `pooling`: how it is made of the states of a text, in words.
    `normalizes`: vectors have a length of 1.
    """

    model_path: str
    architecture: str
    task: str
    dtype: str
    device: str
    pooling: str
    size: int
    normalizes: bool
    context_length: int
    vocab_size: int
    token_budget: int
    max_running_requests: int
    weight_bytes: int
    load_seconds: float
    labels: list[str] = field(default_factory=list)
    remarks: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingReady:
    """The engine serves from now on."""

    info: PoolingInfo
