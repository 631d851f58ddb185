"""Rank 0 without the other ranks, to describe one rank's part of a model."""

from __future__ import annotations

from typing import TypeVar

import torch

from ...kernels.collectives import TENSOR_PARALLEL, set_group
from ...kernels.platform.rank_groups import RankGroups
from ..distributed.ranks import Alone

T = TypeVar("T")


class LoneRank(Alone):
    """Assumes that the other ranks have the same values. Results of collectives have the right
    shape, but no meaning.
    """

    def __init__(self, size: int) -> None:
        self.size = size

    def gather_objects(self, value: T) -> list[T]:
        return [value] * self.size

    def make_group(self, platform: RankGroups) -> None:
        set_group(TENSOR_PARALLEL, _ZeroGroup(self.size))

    def close(self, *, reason: str | None = None, lost: bool = False) -> None:
        set_group(TENSOR_PARALLEL, None)


class _ZeroGroup:
    """A group whose collectives return zeros, so that two forwards that differ only in their
    collectives have equal results.
    """

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)

    def all_reduce_(self, x: torch.Tensor) -> None:
        x.zero_()

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(x.shape[0] * self.size, *x.shape[1:])

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(x.shape[0] // self.size, *x.shape[1:])

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return self.all_gather(x)

    def broadcast(self, x: torch.Tensor) -> None:
        pass

    def give_up(self) -> None:
        pass
