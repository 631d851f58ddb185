"""The ranks of an engine: processes that hold a part of the model each, and run the same steps.

Rank 0 alone has an inbox and an outbox. It tells the others each message and each turn of its loop,
and every rank runs the same deterministic scheduler on them, so plans never travel. What depends on
time or on the machine is decided by rank 0 and told, or agreed on:

    free = ranks.least(platform.memory().free)
    outcome = ranks.told(compiling.poll() if ranks.rank == 0 else None)
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from ...kernels.platform import Platform

T = TypeVar("T")


class Ranks(Protocol):
    """The ranks, seen from one of them. Every rank must make the same calls in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def node(self) -> int:
        """Which of the machines this is; rank 0's is 0."""
        ...

    @property
    def local_rank(self) -> int:
        """Which of the processes on this machine this is, from 0."""
        ...

    @property
    def local_size(self) -> int:
        """How many of the ranks are processes on this machine."""
        ...

    def tell(self, call: str, *arguments: Any) -> None:
        """On rank 0: the others are to do what it does with its engine from here on, `call` of
        `rank_process.follow`; waits for nobody. Elsewhere nothing.
        """
        ...

    def told(self, value: T) -> T:
        """Rank 0's value, on every rank: plain objects. On rank 0 it waits for nobody."""
        ...

    def gathered(self, value: T) -> list[T] | None:
        """Every rank's value, on rank 0, which waits for all; None elsewhere. Raises `ValueError`
        where another rank cannot start for a reason that the user can mend.
        """
        ...

    def least(self, value: int) -> int:
        """The least of all ranks' values, on every rank; waits for all. Raises as `gathered`."""
        ...

    def check(self, digest: Any) -> None:
        """To be called with what identifies a step, before it is launched. Raises `Diverged` where
        rank 0's is another.
        """
        ...

    def make_group(self, platform: Platform) -> None:
        """Set the group of the collectives; waits for all."""
        ...

    def close(self, *, reason: str | None = None, lost: bool = False) -> None:
        """On rank 0: end the others, for good; `reason`: what the user can mend. `lost`: the engine
        is started again, and ranks of other machines are to join that.
        """
        ...


class RankError(RuntimeError):
    """The ranks cannot go on together, for a reason that its text says in a line."""


class Diverged(RankError):
    """Two ranks were about to compute different steps: the engine must end."""


class RankEnded(RankError):
    """A rank is gone: the engine must end."""


class EngineEnded(RankError):
    """Rank 0 has ended for good. `reason`: one that the user can mend."""

    def __init__(self, reason: str | None) -> None:
        super().__init__(reason or "the engine has ended")
        self.reason = reason


class Alone:
    """An engine of one process."""

    rank, size = 0, 1
    node, local_rank, local_size = 0, 0, 1

    def tell(self, call: str, *arguments: Any) -> None:
        pass

    def told(self, value: T) -> T:
        return value

    def gathered(self, value: T) -> list[T] | None:
        return [value]

    def least(self, value: int) -> int:
        return value

    def check(self, digest: Any) -> None:
        pass

    def make_group(self, platform: Platform) -> None:
        pass

    def close(self, *, reason: str | None = None, lost: bool = False) -> None:
        pass


ALONE = Alone()
