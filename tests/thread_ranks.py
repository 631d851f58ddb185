"""Ranks as threads of one process, so that a test needs no processes: they see one group and one
control channel, each its own rank of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, TypeVar, cast

import torch

from piecework.kernels import collectives
from piecework.runtime.distributed.ranks import Diverged, EngineEnded

T = TypeVar("T")
_TIMEOUT = 60.0
_own = threading.local()


def current_rank() -> int:
    """Of this thread."""
    rank: int = _own.rank
    return rank


class ThreadRanks:
    """A `collectives.Group` and a `Ranks`, as the thread that asks sees them. `calls`: the names of
    the collectives that rank 0 has taken part in, in order.
    """

    # One process, which gets all cores of the machine.
    node, local_rank, local_size = 0, 0, 1

    def __init__(self, size: int) -> None:
        self.size = size
        self.calls: list[str] = []
        self._barrier = threading.Barrier(size, timeout=_TIMEOUT)
        self._values: list[Any] = [None] * size
        self._closed = False

    @property
    def rank(self) -> int:
        return current_rank()

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        self._values[self.rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values

    def _collect(self, name: str, x: torch.Tensor) -> list[torch.Tensor]:
        if self.rank == 0:
            self.calls.append(name)
        found = self.exchange((name, x.clone()))
        names = {each for each, _ in found}
        assert names == {name}, f"ranks meet in different collectives: {names}"
        return [each for _, each in found]

    # As a group

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return _sum(self._collect("all_reduce", x))

    def all_reduce_(self, x: torch.Tensor) -> None:
        x.copy_(self.all_reduce(x))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._collect("all_gather", x))

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        total = _sum(self._collect("reduce_scatter", x))
        return total.chunk(self.size)[self.rank].clone()

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        found = self._collect("all_to_all", x)
        return torch.cat([each.chunk(self.size)[self.rank] for each in found])

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        found = self._collect("gather", x)
        return torch.cat(found) if self.rank == 0 else None

    def broadcast(self, x: torch.Tensor) -> None:
        x.copy_(self._collect("broadcast", x)[0])

    # As ranks

    def call(self, name: str, *arguments: Any) -> None:
        if self.rank == 0:
            self.exchange((name, arguments))

    def next_call(self, within: float | None = None) -> tuple[str, tuple[Any, ...]]:
        call: tuple[str, tuple[Any, ...]] = self.exchange(None)[0]
        if call[0] == "end":
            raise EngineEnded(None)
        return call

    def gather_objects(self, value: T) -> list[T] | None:
        values = self.exchange(value)
        return values if self.rank == 0 else None

    def make_group(self, platform: Any) -> None:
        pass

    def close(self, **how: Any) -> None:
        if not self._closed:
            self._closed = True
            # The others may have failed meanwhile.
            with suppress(threading.BrokenBarrierError):
                self.call("end")

    def broadcast_object(self, value: T) -> T:
        return cast(T, self.exchange(value)[0])

    def minimum(self, value: int) -> int:
        return int(min(self.exchange(value)))

    def check(self, digest: Any) -> None:
        digests = self.exchange(digest)
        if digests[0] != digest:
            raise Diverged(f"rank {self.rank} computes {digest}, rank 0 {digests[0]}")

    def abort(self) -> None:
        """Ends the wait of all others."""
        self._barrier.abort()

    give_up = abort


def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


@contextmanager
def thread_ranks(size: int, *, group: str = collectives.TENSOR_PARALLEL) -> Iterator[ThreadRanks]:
    """Ranks whose collectives go by the name of `group` inside the block."""
    ranks = ThreadRanks(size)
    collectives.set_group(group, ranks)
    try:
        yield ranks
    finally:
        collectives.set_group(group, None)


def on_ranks(ranks: ThreadRanks, run: Callable[[int], T]) -> list[T]:
    """What `run(rank)` returns on each rank, all at once. Raises what the first to fail raised."""

    def on_rank(rank: int) -> T:
        _own.rank = rank
        try:
            return run(rank)
        except threading.BrokenBarrierError:
            raise
        except BaseException:
            ranks.abort()
            raise

    with ThreadPoolExecutor(ranks.size) as pool:
        futures = [pool.submit(on_rank, rank) for rank in range(ranks.size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]
