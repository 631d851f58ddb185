"""Collectives: what the ranks of an engine compute together, as ops of torch.

A group is set once in each process, by its name; the ops name it, so a traced forward is the same
on every rank:

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
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

TENSOR_PARALLEL = "tp"
"""The group that a layer's weights are split over."""


class CollectiveError(RuntimeError):
    """Ranks did not meet: one is late, gone, or in another collective. The engine must end.
    `missing`: those that did not come.
    """

    def __init__(self, text: str, missing: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.missing = missing


class Group(Protocol):
    """The ranks that take part, seen from one of them. Tensors are contiguous, results new."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's x: the same bits on every rank, and again in the next run."""
        ...

    def all_reduce_(self, x: torch.Tensor) -> None:
        """The same, written into x."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """x [R, ...] of every rank, in the order of ranks: [size * R, ...]."""
        ...

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's x [size * R, ...], of which each gets its own R rows."""
        ...

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """Of x [size * R, ...] each rank gets its own R rows, from every rank: [size * R, ...]."""
        ...

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        """`all_gather` on rank 0; None elsewhere."""
        ...

    def broadcast(self, x: torch.Tensor) -> None:
        """Write rank 0's numbers into every rank's x."""
        ...

    def give_up(self) -> None:
        """A rank is gone: what waits for it in this process is to wait no more. From any thread."""
        ...


_groups: dict[str, Group] = {}


def set_group(name: str, group: Group | None) -> None:
    """From now on the ops mean this group by `name`; None: there is none any more."""
    if group is None:
        _groups.pop(name, None)
    else:
        _groups[name] = group


def get_group(name: str) -> Group:
    """Raises `KeyError` where there is none: a model was split that nobody runs in ranks."""
    return _groups[name]


def has_group(name: str) -> bool:
    return name in _groups


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
"""Nodes of a traced forward: their signatures, and the results' kinds. `size`: of the group, which
a process that only traces does not have.
"""
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


IN_PLACE = torch.ops.piecework.all_reduce_.default
"""The form of `all_reduce` that writes over x."""


def all_reduce(x: torch.Tensor, group: str) -> torch.Tensor:
    """The sum of every rank's x."""
    result: torch.Tensor = torch.ops.piecework.all_reduce.default(x, group)
    return result


class TorchGroup:
    """A group of `torch.distributed`: gloo, nccl or hccl, as the process group was made.

    Raises `CollectiveError` where a rank does not come within `seconds`, the process group's limit,
    or is gone. `store`: where ranks that find this out say what they wait for, so that each knows
    who does not.
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
        """Nothing to do: the library finds out that a connection has ended."""

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

        # Rank 0 has the store, and may be who hangs: it would be waited for without end.
        asked = threading.Event()
        threading.Thread(target=ask, name="who is late", daemon=True).start()
        missing = found if asked.wait(_WORD_SECONDS + _STORE_SECONDS) else [0]
        them = "other ranks" if not missing else f"rank {', '.join(map(str, missing))}"
        what = "cannot be reached"
        if late:
            what = f"did not come within {self._seconds:g} s (--dist-timeout)"
        return CollectiveError(f"rank {self.rank} is in {call}, where {them} {what}", missing)


_LATE = 0.9
"""Of the time limit: what fails earlier fails because a rank is gone."""
_WORD_SECONDS, _STORE_SECONDS = 1.0, 3.0
"""How long others have to find out, too, that something is wrong, and the store to answer."""
