"""The ranks of an engine: processes that each hold a part of the model and run the same steps.

Only rank 0 has an inbox and an outbox. It broadcasts each message and each iteration of its loop.
Every rank runs the same deterministic scheduler, so plans are not sent. Rank 0 decides what depends
on time or on the machine, or the ranks agree on it:

    free = ranks.minimum(platform.memory().free)
    outcome = ranks.broadcast_object(compiling.poll() if ranks.rank == 0 else None)
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from ...kernels.platform.rank_groups import RankGroups

T = TypeVar("T")


class Ranks(Protocol):
    """The ranks, seen from one of them. Every rank must make the same calls in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def node(self) -> int:
        """Index of this machine. Rank 0 is on machine 0."""
        ...

    @property
    def local_rank(self) -> int:
        """Index of this process among the ranks of this machine, from 0."""
        ...

    @property
    def local_size(self) -> int:
        """Number of ranks on this machine."""
        ...

    def call(self, name: str, *arguments: Any) -> None:
        """On rank 0, have the other ranks repeat a call: see `rank_process.follow`.

        Do not wait for them. On other ranks, do nothing.
        """
        ...

    def broadcast_object(self, value: T) -> T:
        """Return rank 0's value, a plain object, on every rank. Rank 0 does not wait."""
        ...

    def gather_objects(self, value: T) -> list[T] | None:
        """Return the values of all ranks on rank 0, which waits for them, and None on other ranks.

        Raise `ValueError` if another rank cannot start for a reason that the user can correct.
        """
        ...

    def minimum(self, value: int) -> int:
        """Return the minimum of all ranks on every rank. Wait and raise as `gather_objects`."""
        ...

    def check(self, digest: Any) -> None:
        """Compare the digest of a step with that of rank 0, before the step is launched.

        Raise `Diverged` if they differ.
        """
        ...

    def make_group(self, platform: RankGroups) -> None:
        """Set the group of the collectives. Wait for all ranks."""
        ...

    def close(self, *, reason: str | None = None, lost: bool = False) -> None:
        """On rank 0, end the other ranks. `reason` is an error that the user can correct.

        If `lost` is set, the engine restarts, and ranks of other machines must join it again.
        """
        ...


class RankError(RuntimeError):
    """The ranks cannot continue. The text is one line."""


class Diverged(RankError):
    """Two ranks were about to compute different steps. The engine must end."""


class RankEnded(RankError):
    """A rank has ended. The engine must end."""


class EngineEnded(RankError):
    """Rank 0 has ended. `reason` is an error that the user can correct, or None."""

    def __init__(self, reason: str | None) -> None:
        super().__init__(reason or "the engine has ended")
        self.reason = reason


class Alone:
    """The `Ranks` of an engine with one process."""

    rank, size = 0, 1
    node, local_rank, local_size = 0, 0, 1

    def call(self, name: str, *arguments: Any) -> None:
        pass

    def broadcast_object(self, value: T) -> T:
        return value

    def gather_objects(self, value: T) -> list[T] | None:
        return [value]

    def minimum(self, value: int) -> int:
        return value

    def check(self, digest: Any) -> None:
        pass

    def make_group(self, platform: RankGroups) -> None:
        pass

    def close(self, *, reason: str | None = None, lost: bool = False) -> None:
        pass


ALONE = Alone()
