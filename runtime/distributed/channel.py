"""The control channel: what rank 0 tells the others, in order, and what they answer when they are
asked.

A connection for each other rank. All that goes one way is one stream, so that a rank which does
something else than rank 0 finds out at the next item. Items are pickled, for messages are
dataclasses that `piecework.LLM` has no msgspec for: whoever can write to a connection can run code,
so it is a pair of sockets that only the two processes hold, or, between machines, a connection that
takes nothing but what the other end proves to have sent (`sealed`).
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Sequence
from enum import Enum
from multiprocessing.connection import wait
from typing import Any, Protocol, TypeVar

from ...kernels.collectives import CollectiveError
from ...kernels.platform import Platform
from .ranks import Diverged, EngineEnded, RankEnded

T = TypeVar("T")
MakeGroup = Callable[[Platform, int, int], None]
"""(platform, rank, size): sets the group of this rank."""


class Kind(Enum):
    """What an item of the stream is."""

    CALL = "a call"
    VALUE = "a value"
    STEP = "a step"
    ANSWER = "an answer"
    FAILED = "a failure"
    END = "the end"


class Channel(Protocol):
    """What carries items between two ranks, whole and in order, as
    `multiprocessing.connection.Connection` does.
    """

    def send_bytes(self, message: bytes, /) -> None: ...

    def recv_bytes(self) -> bytes: ...

    def fileno(self) -> int: ...

    def close(self) -> None: ...


class Leader:
    """The ranks as rank 0 sees them; `others` in order. A `Ranks`."""

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

    def tell(self, call: str, *arguments: Any) -> None:
        self._send(Kind.CALL, (call, arguments))

    def told(self, value: T) -> T:
        self._send(Kind.VALUE, value)
        return value

    def gathered(self, value: T) -> list[T] | None:
        return [value, *(self._answer(rank) for rank in range(1, self.size))]

    def least(self, value: int) -> int:
        values = self.gathered(value)
        assert values is not None
        return self.told(min(values))

    def check(self, digest: Any) -> None:
        self._send(Kind.STEP, digest)

    def make_group(self, platform: Platform) -> None:
        self._make_group(platform, 0, self.size)

    def close(self, *, reason: str | None = None, lost: bool = False) -> None:
        def say() -> None:
            for other in self._others:
                with contextlib.suppress(OSError):
                    other.send_bytes(pickle.dumps((Kind.END, reason)))

        self._end(None if lost else say)

    def _send(self, kind: Kind, value: Any) -> None:
        item = pickle.dumps((kind, value))
        for rank, other in enumerate(self._others, start=1):
            try:
                other.send_bytes(item)
            except BlockingIOError:
                reason = "has not taken what it was told within --dist-timeout"
                raise RankEnded(f"rank {rank} {reason}") from None
            except OSError:
                raise RankEnded(f"rank {rank} has ended") from None

    def _answer(self, rank: int) -> Any:
        try:
            kind, value = pickle.loads(self._others[rank - 1].recv_bytes())
        except (EOFError, OSError):
            raise RankEnded(f"rank {rank} has ended") from None
        if kind is Kind.FAILED:
            raise ValueError(f"rank {rank}: {value}")
        return value


class Follower:
    """The ranks as one that is not rank 0 sees them. A `Ranks`."""

    def __init__(
        self, rank: int, size: int, leader: Channel, make_group: MakeGroup, *, local_size: int
    ) -> None:
        self.rank, self.size = rank, size
        self.node, self.local_rank = divmod(rank, local_size)
        self.local_size = local_size
        self._leader, self._make_group = leader, make_group

    def tell(self, call: str, *arguments: Any) -> None:
        pass

    def next_call(self, within: float | None = None) -> tuple[str, tuple[Any, ...]]:
        """What rank 0 does next, and with what. Raises `CollectiveError` where it does nothing
        within so many seconds.
        """
        if within is not None and not wait([self._leader.fileno()], within):
            raise CollectiveError(
                f"rank {self.rank} waits for rank 0, which took no step within {within:g} s "
                "(--dist-timeout)",
                [0],
            )
        call: tuple[str, tuple[Any, ...]] = self._receive(Kind.CALL)
        return call

    def told(self, value: T) -> T:
        told: T = self._receive(Kind.VALUE)
        return told

    def gathered(self, value: T) -> list[T] | None:
        self._leader.send_bytes(pickle.dumps((Kind.ANSWER, value)))
        return None

    def least(self, value: int) -> int:
        self.gathered(value)
        return self.told(value)

    def check(self, digest: Any) -> None:
        if (leading := self._receive(Kind.STEP)) != digest:
            raise Diverged(f"rank {self.rank} computes step {digest}, rank 0 {leading}")

    def make_group(self, platform: Platform) -> None:
        self._make_group(platform, self.rank, self.size)

    def close(self, *, reason: str | None = None, lost: bool = False) -> None:
        pass

    def fail(self, reason: str) -> None:
        """This rank cannot start, for a reason that the user can mend: rank 0 says so. Returns once
        it has heard that.
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
