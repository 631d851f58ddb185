"""Rank 0 of several, of which the others are not there: for what only looks at a rank's part."""

from __future__ import annotations

from typing import TypeVar

import torch

from ...kernels.collectives import TENSOR_PARALLEL, set_group
from ...kernels.platform import Platform
from ..distributed.ranks import Alone

T = TypeVar("T")


class LoneRank(Alone):
    """The others are taken to say what it says; what collectives give has its shape, and no
    meaning.
    """

    def __init__(self, size: int) -> None:
        self.size = size

    def gathered(self, value: T) -> list[T]:
        return [value] * self.size

    def make_group(self, platform: Platform) -> None:
        set_group(TENSOR_PARALLEL, _Silence(self.size))


class _Silence:
    """All that ranks compute together is zeros, whichever collectives it goes through: forwards
    that differ in these alone give the same.
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
