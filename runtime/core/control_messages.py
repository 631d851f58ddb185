"""Messages that stop an engine for a while, and those that change its weights.

The engine answers each with a `Controlled`, in their order.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Run no further step until `Resume`.

    `retract` frees the memory of running requests, which are computed again later. Otherwise they
    keep it.
    """

    retract: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Continue after `Pause`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sleep:
    """Free the memory of the KV cache and of the weights until `WakeUp`. Requests wait.

    At level 1 the weights are kept outside of the device, or on a CPU in a file. At level 2 they
    are read from the model again.
    """

    level: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeUp:
    """Continue after `Sleep`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateWeights:
    """Replace the weights by those of another model of the same architecture and shapes.

    Running requests finish on the old weights, or with `at_once` continue on the new ones. Their
    keys and values are then computed again.
    """

    model_path: str
    at_once: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadWeights:
    """Return the first `count` numbers of a parameter."""

    name: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Controlled:
    """The answer. `error` says why nothing was changed, `numbers` are those of `ReadWeights`.

    `seconds` is the time during which no step ran, `freed_bytes` the memory that `Sleep` freed.
    """

    error: str | None = None
    seconds: float = 0.0
    freed_bytes: int = 0
    numbers: list[float] | None = None


Control = Pause | Resume | Sleep | WakeUp | UpdateWeights | ReadWeights
