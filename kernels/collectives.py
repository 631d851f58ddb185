"""Collectives: what the ranks of an engine compute together, as ops of torch.

A group is set once in each process, by its name; the ops name it, so a traced forward is the same
on every rank:

    collectives.set_group(TENSOR_PARALLEL, TorchGroup(torch.distributed.group.WORLD))
    y = collectives.all_reduce(x, TENSOR_PARALLEL)

A collective returns when the next op on the same device may read its result. Every rank must run
the same collectives, with tensors of the same shapes, in the same order.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

TENSOR_PARALLEL = "tp"
"""The group that a layer's weights are split over."""


class CollectiveError(RuntimeError):
    """Ranks did not meet: one is late, gone, or in another collective. The engine must end."""


class Group(Protocol):
    """The ranks that take part, seen from one of them. Tensors are contiguous, results new."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's x: the same bits on every rank, and again in the next run."""
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


def _all_gather(x: torch.Tensor, group: str, size: int) -> torch.Tensor:
    return _groups[group].all_gather(x.contiguous())


def _reduce_scatter(x: torch.Tensor, group: str, size: int) -> torch.Tensor:
    return _groups[group].reduce_scatter(x.contiguous())


for _name, _run in (
    ("all_reduce", _all_reduce),
    ("all_gather", _all_gather),
    ("reduce_scatter", _reduce_scatter),
):
    _signature, _meta = OPS[_name]
    _LIBRARY.define(_name + _signature)  # type: ignore[no-untyped-call]
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    _LIBRARY.impl(_name, _meta, "Meta")  # type: ignore[no-untyped-call]


def all_reduce(x: torch.Tensor, group: str) -> torch.Tensor:
    """The sum of every rank's x."""
    result: torch.Tensor = torch.ops.piecework.all_reduce.default(x, group)
    return result


class TorchGroup:
    """A group of `torch.distributed`: gloo, nccl or hccl, as the process group was made."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = group.rank(), group.size()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        result = x.clone()
        dist.all_reduce(result, group=self._group)
        return result

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        result = x.new_empty(x.shape[0] * self.size, *x.shape[1:])
        dist.all_gather_into_tensor(result, x, group=self._group)
        return result

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        result = x.new_empty(x.shape[0] // self.size, *x.shape[1:])
        dist.reduce_scatter_tensor(result, x, group=self._group)
        return result

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        result = torch.empty_like(x)
        dist.all_to_all_single(result, x, group=self._group)
        return result

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        # HCCL has no gather (torch_npu, csrc/distributed/ProcessGroupHCCL.cpp).
        parts = self.all_gather(x)
        return parts if self.rank == 0 else None

    def broadcast(self, x: torch.Tensor) -> None:
        dist.broadcast(x, group_src=0, group=self._group)
