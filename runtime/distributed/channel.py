"""The control channel: the calls and values that rank 0 sends to the other ranks, and their
answers.

Each other rank has a connection to rank 0. All items of one direction are one stream, so a rank
that diverges from rank 0 finds out at the next item. Items are pickled, because `piecework.LLM`
runs without msgspec. Pickle lets the sender run code. Therefore the connection is a pair of sockets
that only the two processes hold, or, between machines, a connection that authenticates each message
(`sealed`).
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Sequence
from enum import Enum
from multiprocessing.connection import wait
from typing import Any, Protocol, TypeVar

from ...kernels.collectives import CollectiveError
from ...kernels.platform.rank_groups import RankGroups
from .ranks import Diverged, EngineEnded, RankEnded

T = TypeVar("T")
# Sets the group of this rank. Takes (platform, rank, size).
MakeGroup = Callable[[RankGroups, int, int], None]


class Kind(Enum):
    """The kinds of items in the stream."""

    CALL = "a call"
    VALUE = "a value"
    STEP = "a step"
    ANSWER = "an answer"
    FAILED = "a failure"
    END = "the end"


class Channel(Protocol):
    """A connection of two ranks that delivers items whole and in order.

    `multiprocessing.connection.Connection` is one.
    """

    def send_bytes(self, message: bytes, /) -> None: ...

    def recv_bytes(self) -> bytes: ...

    def fileno(self) -> int: ...

    def close(self) -> None: ...


class Leader:
    """The `Ranks` of rank 0. `others` are the connections to the other ranks, in order."""

    rank = local_rank = node = 0

    def __init__(
        self,
        others: Sequence[Channel],
        make_group: MakeGroup,
        end: Callable[[Callable[[], None] | None], None],
        *,
        local_size: int,
    ) -> None:
        self.size, self.local_size = 1 + len(others), local_size
        self._others, self._make_group, self._end = others, make_group, end

    def call(self, name: str, *arguments: Any) -> None:
        self._send(Kind.CALL, (name, arguments))

    def broadcast_object(self, value: T) -> T:
        self._send(Kind.VALUE, value)
        return value

    def gather_objects(self, value: T) -> list[T] | None:
        values = [value]
        for rank in range(1, self.size):
            try:
                kind, answer = pickle.loads(self._others[rank - 1].recv_bytes())
            except (EOFError, OSError):
                raise RankEnded(f"rank {rank} has ended") from None
            if kind is Kind.FAILED:
                raise ValueError(f"rank {rank}: {answer}")
            values.append(answer)
        return values

    def minimum(self, value: int) -> int:
        values = self.gather_objects(value)
        assert values is not None
        return self.broadcast_object(min(values))

    def check(self, digest: Any) -> None:
        self._send(Kind.STEP, digest)

    def make_group(self, platform: RankGroups) -> None:
        self._make_group(platform, 0, self.size)

    def close(self, *, reason: str | None = None, lost: bool = False) -> None:
        def announce() -> None:
            for other in self._others:
                with contextlib.suppress(OSError):
                    other.send_bytes(pickle.dumps((Kind.END, reason)))

        self._end(None if lost else announce)

    def _send(self, kind: Kind, value: Any) -> None:
        item = pickle.dumps((kind, value))
        for rank, other in enumerate(self._others, start=1):
            try:
                other.send_bytes(item)
            except BlockingIOError:
                raise RankEnded(
                    f"rank {rank} did not read a message within --dist-timeout"
                ) from None
            except OSError:
                raise RankEnded(f"rank {rank} has ended") from None


class Follower:
    """The `Ranks` of a rank other than 0."""

    def __init__(
        self, rank: int, size: int, leader: Channel, make_group: MakeGroup, *, local_size: int
    ) -> None:
        self.rank, self.size = rank, size
        self.node, self.local_rank = divmod(rank, local_size)
        self.local_size = local_size
        self._leader, self._make_group = leader, make_group

    def call(self, name: str, *arguments: Any) -> None:
        pass

    def next_call(self, within: float | None = None) -> tuple[str, tuple[Any, ...]]:
        """Return the next call of rank 0 and its arguments.

        Raise `CollectiveError` if there is none `within` this number of seconds.
        """
        if within is not None and not wait([self._leader.fileno()], within):
            raise CollectiveError(
                f"rank {self.rank} waits for rank 0, which took no step within {within:g} s "
                "(--dist-timeout)",
                [0],
            )
        call: tuple[str, tuple[Any, ...]] = self._receive(Kind.CALL)
        return call

    def broadcast_object(self, value: T) -> T:
        leading: T = self._receive(Kind.VALUE)
        return leading

    def gather_objects(self, value: T) -> list[T] | None:
        self._leader.send_bytes(pickle.dumps((Kind.ANSWER, value)))
        return None

    def minimum(self, value: int) -> int:
        self.gather_objects(value)
        return self.broadcast_object(value)

    def check(self, digest: Any) -> None:
        if (leading := self._receive(Kind.STEP)) != digest:
            raise Diverged(f"rank {self.rank} computes step {digest}, rank 0 {leading}")

    def make_group(self, platform: RankGroups) -> None:
        self._make_group(platform, self.rank, self.size)

    def close(self, *, reason: str | None = None, lost: bool = False) -> None:
        pass

    def fail(self, reason: str) -> None:
        """Report to rank 0 that this rank cannot start for a reason that the user can correct.

        Return when rank 0 has received it.
        """
        with contextlib.suppress(EOFError, OSError):
            self._leader.send_bytes(pickle.dumps((Kind.FAILED, reason)))
            while pickle.loads(self._leader.recv_bytes())[0] is not Kind.END:
                pass

    def _receive(self, kind: Kind) -> Any:
        try:
            found, value = pickle.loads(self._leader.recv_bytes())
        except (EOFError, OSError):
            raise RankEnded("rank 0 has ended") from None
        if found is Kind.END:
            raise EngineEnded(value)
        if found is not kind:
            raise Diverged(f"rank {self.rank} waits for {kind.value}, rank 0 sent {found.value}")
        return value
