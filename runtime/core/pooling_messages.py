"""Messages between the web process and the engine of a pooling model.

`core.messages` lists them among all messages.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# Inputs of one `PoolRequest`. Larger requests of clients are split, so that others run between.
INPUTS_PER_REQUEST = 32
NO_ADAPTER = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRequest:
    """Compute a vector or a score for each input.

    Attributes:
        token_ids: Tokens of all inputs, one after another, as little-endian integers of 4 bytes.
        lengths: Number of tokens of each input, at least 1.
        firsts: For pairs, the number of tokens of the first text; empty if no input is a pair.
        adapters: The number of each input's adapter, or `NO_ADAPTER`; empty if none has one.
    """

    rid: str
    token_ids: bytes
    lengths: list[int]
    firsts: list[int] = field(default_factory=list)
    adapters: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOutput:
    """The result of a `PoolRequest`.

    `vectors` are those of its inputs in order, each `PoolingInfo.size` little-endian float32
    numbers. `error` says why there are none.
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
    """The results since the last message, and the metrics."""

    outputs: list[PoolOutput]
    stats: PoolStats


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingInfo:
    """Describes a ready engine of a pooling model. Sizes are in tokens, memory is in bytes.

    Attributes:
        task: "embed" or "classify".
        size: Numbers of a vector; 1 for a score.
        labels: Names of a classifier's numbers, in order.
        pooling: How a vector is made from the hidden states of a text, in words.
        normalizes: Whether vectors have length 1.
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
    """The engine serves requests from now on."""

    info: PoolingInfo
