"""Collectives: what the ranks of an engine compute together, as ops of torch.

Each process sets a group once, under a name. The ops refer to the name, so a traced forward is the
same on every rank:

    collectives.set_group(TENSOR_PARALLEL, platform.make_group(store, rank, size, seconds=120))
    y = collectives.all_reduce(x, TENSOR_PARALLEL)

A collective returns when the next op on the same device may read its result. Every rank must run
the same collectives, with tensors of the same shapes, in the same order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

TENSOR_PARALLEL = "tp"  # Group that a layer's weights are split over.


class CollectiveError(RuntimeError):
    """A collective failed: a rank is late, gone, or in another collective. The engine must end.

    `missing` holds the ranks that did not join the call.
    """

    def __init__(self, text: str, missing: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.missing = missing


class Group(Protocol):
    """The ranks that take part, seen from one of them. Tensors are contiguous, and results are new
    tensors.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of every rank's x. The bits are equal on all ranks and in all runs."""
        ...

    def all_reduce_(self, x: torch.Tensor) -> None:
        """Write the sum of every rank's x into x."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate every rank's x [R, ...] in the order of ranks: [size * R, ...]."""
        ...

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Sum every rank's x [size * R, ...], and return this rank's R rows of the sum."""
        ...

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """Send each rank its R rows of x [size * R, ...], and return the rows received: [size * R,
        ...].
        """
        ...

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return `all_gather` on rank 0, None elsewhere."""
        ...

    def broadcast(self, x: torch.Tensor) -> None:
        """Write rank 0's numbers into every rank's x."""
        ...

    def give_up(self) -> None:
        """Stop waiting in this process, because a rank is gone. May be called from any thread."""
        ...


_groups: dict[str, Group] = {}


@runtime_checkable
class HoldsMemory(Protocol):
    """A group with memory that it does not need any more when it is removed."""

    def free_memory(self) -> None: ...


def set_group(name: str, group: Group | None) -> None:
    """Set the group that the ops use under `name`. None removes it and frees its memory."""
    if group is None:
        if isinstance(removed := _groups.pop(name, None), HoldsMemory):
            removed.free_memory()
    else:
        _groups[name] = group


def get_group(name: str) -> Group:
    """Return the group. Raise `KeyError` if it was not set."""
    return _groups[name]


def has_group(name: str) -> bool:
    return name in _groups


# Nodes of a traced forward: their signatures, and functions that return empty results. A process
# that only traces has no group, so `size` is an argument.
OPS = {
    "all_reduce": ("(Tensor x, str group) -> Tensor", lambda x, group: x.new_empty(x.shape)),
    "all_reduce_": ("(Tensor(a!) x, str group) -> Tensor(a!)", lambda x, group: x),
    "all_gather": (
        "(Tensor x, str group, int size) -> Tensor",
        lambda x, group, size: x.new_empty(x.shape[0] * size, *x.shape[1:]),
    ),
    "reduce_scatter": (
        "(Tensor x, str group, int size) -> Tensor",
        lambda x, group, size: x.new_empty(x.shape[0] // size, *x.shape[1:]),
    ),
}
_LIBRARY = torch.library.Library("piecework", "FRAGMENT")  # type: ignore[no-untyped-call]


def _all_reduce(x: torch.Tensor, group: str) -> torch.Tensor:
    return _groups[group].all_reduce(x.contiguous())


def _all_reduce_(x: torch.Tensor, group: str) -> torch.Tensor:
    if x.is_contiguous():
        _groups[group].all_reduce_(x)
        return x
    return x.copy_(_groups[group].all_reduce(x.contiguous()))


def _all_gather(x: torch.Tensor, group: str, size: int) -> torch.Tensor:
    return _groups[group].all_gather(x.contiguous())


def _reduce_scatter(x: torch.Tensor, group: str, size: int) -> torch.Tensor:
    return _groups[group].reduce_scatter(x.contiguous())


for _name, _run in (
    ("all_reduce", _all_reduce),
    ("all_reduce_", _all_reduce_),
    ("all_gather", _all_gather),
    ("reduce_scatter", _reduce_scatter),
):
    _signature, _meta = OPS[_name]
    _LIBRARY.define(_name + _signature)  # type: ignore[no-untyped-call]
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    _LIBRARY.impl(_name, _meta, "Meta")  # type: ignore[no-untyped-call]


IN_PLACE = torch.ops.piecework.all_reduce_.default  # The `all_reduce` that writes over x.


def all_reduce(x: torch.Tensor, group: str) -> torch.Tensor:
    """Return the sum of every rank's x."""
    result: torch.Tensor = torch.ops.piecework.all_reduce.default(x, group)
    return result


class TorchGroup:
    """A group of `torch.distributed`: gloo, nccl or hccl.

    If a collective fails, the rank waits a second and then reads from the store which ranks wait
    too.
    """

    def __init__(self, group: dist.ProcessGroup, store: Store, seconds: float) -> None:
        self._group, self._store, self._seconds = group, store, seconds
        self.rank, self.size = group.rank(), group.size()
        self._number = 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        result = x.clone()
        self.all_reduce_(result)
        return result

    def all_reduce_(self, x: torch.Tensor) -> None:
        with self._in("all_reduce"):
            dist.all_reduce(x, group=self._group)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        result = x.new_empty(x.shape[0] * self.size, *x.shape[1:])
        with self._in("all_gather"):
            dist.all_gather_into_tensor(result, x, group=self._group)
        return result

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        result = x.new_empty(x.shape[0] // self.size, *x.shape[1:])
        with self._in("reduce_scatter"):
            dist.reduce_scatter_tensor(result, x, group=self._group)
        return result

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        result = torch.empty_like(x)
        with self._in("all_to_all"):
            dist.all_to_all_single(result, x, group=self._group)
        return result

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        # HCCL has no gather (torch_npu, csrc/distributed/ProcessGroupHCCL.cpp).
        parts = self.all_gather(x)
        return parts if self.rank == 0 else None

    def broadcast(self, x: torch.Tensor) -> None:
        with self._in("broadcast"):
            dist.broadcast(x, group_src=0, group=self._group)

    def give_up(self) -> None:
        """Do nothing: the library notices that a connection has ended."""

    @contextmanager
    def _in(self, op: str) -> Iterator[None]:
        self._number += 1
        began = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            late = time.monotonic() - began >= _LATE * self._seconds
            raise self._fault(f"{op} no. {self._number}", late=late) from error

    def _fault(self, call: str, *, late: bool) -> CollectiveError:
        found: list[int] = []

        def ask() -> None:
            with suppress(RuntimeError):
                self._store.set(f"waits {self.rank}", call)
                time.sleep(_WORD_SECONDS)
                there = [self._store.check([f"waits {rank}"]) for rank in range(self.size)]
                found.extend(rank for rank, is_there in enumerate(there) if not is_there)
                asked.set()

        # Rank 0 runs the store and may be the rank that hangs, so the store may never answer.
        asked = threading.Event()
        threading.Thread(target=ask, name="who is late", daemon=True).start()
        missing = found if asked.wait(_WORD_SECONDS + _STORE_SECONDS) else [0]
        them = "other ranks" if not missing else f"rank {', '.join(map(str, missing))}"
        what = "cannot be reached"
        if late:
            what = f"did not come within {self._seconds:g} s (--dist-timeout)"
        return CollectiveError(f"rank {self.rank} is in {call}, where {them} {what}", missing)


_LATE = 0.9  # Share of the timeout. A collective that fails earlier fails because a rank is gone.
# Seconds for other ranks to notice the failure, and for the store to answer.
_WORD_SECONDS, _STORE_SECONDS = 1.0, 3.0
