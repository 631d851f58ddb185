"""Groups of the ranks that compute one model on devices of one kind."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..collectives import Group, TorchGroup
from .device import Device


class RankGroups(Device):
    """What connects the ranks of an engine.

    groups.check_ranks(2)
    group = groups.make_group(store, rank=0, size=2, seconds=120)
    """

    collectives: str = "gloo"  # Backend of torch.distributed for the collectives of ranks.
    group_type: type[TorchGroup] = TorchGroup
    # Whether `make_group` must make torch.distributed's default group, because a library uses that.
    groups_of_torch: bool = False

    def check_ranks(self, number: int) -> None:
        """Raise `ValueError` with a remedy if there are not enough devices for `number` ranks."""

    def make_group(self, store: Any, rank: int, size: int, *, seconds: float) -> Group:
        """Return the `torch.distributed` group of the ranks that meet at `store`. Wait for all of
        them.

        Call it once per process. `seconds` is the timeout for a rank.
        """
        dist.init_process_group(
            self.collectives,
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=seconds),
        )
        assert dist.group.WORLD is not None
        return self.group_type(dist.group.WORLD, store, seconds)
