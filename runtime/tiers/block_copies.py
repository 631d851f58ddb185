"""Copies blocks between the tensors of a KV cache and host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..cache.pool import KVPool
from ..cache.states import StatePool


class BlockCopies:
    """The bytes of a block are those of all tensors of its kind, in the order of the layers.

    Attributes:
        num_bytes: By kind of cache, the bytes of a block. The kinds are numbered as in
            `cache.kinds.make_cache`: full pages, then window pages and recurrent states if the
            model has them.
    """

    def __init__(self, pool: KVPool, states: StatePool | None) -> None:
        full, windows = list[torch.Tensor](), list[torch.Tensor]()
        for number, layout in enumerate(pool.layouts):
            if layout.shares is not None:
                continue
            tensors = windows if pool.second[number] or pool.only_windows else full
            tensors.append(pool.k[number])
            if not layout.latent:
                tensors.append(pool.v[number])
            if number in pool.index:
                tensors.append(pool.index[number])
        self._kinds = [full]
        if pool.window is not None:
            self._kinds.append(windows)
        if states is not None:
            self._kinds.append([tensor for layer in states.tensors for tensor in layer])
        # As bytes, because some dtypes cannot be indexed: [blocks, bytes of one].
        self._kinds = [
            [tensor.view(torch.uint8).view(len(tensor), -1) for tensor in tensors]
            for tensors in self._kinds
        ]
        self.num_bytes = [sum(each.shape[1] for each in tensors) for tensors in self._kinds]

    def read(self, kind: int, numbers: Sequence[int]) -> torch.Tensor:
        """Return the blocks [n, bytes] uint8 in host memory, after the steps launched before."""
        tensors = self._kinds[kind]
        if not tensors:
            return torch.empty(len(numbers), 0, dtype=torch.uint8)
        places = torch.tensor(numbers, device=tensors[0].device)
        return torch.cat([each[places] for each in tensors], 1).cpu()

    def write(self, kind: int, numbers: Sequence[int], blocks: torch.Tensor) -> None:
        """Write blocks [n, bytes] uint8 before the steps that are launched later."""
        tensors = self._kinds[kind]
        if not tensors:
            return
        places, begin = torch.tensor(numbers, device=tensors[0].device), 0
        blocks = blocks.to(tensors[0].device)
        for tensor in tensors:
            end = begin + tensor.shape[1]
            tensor.index_copy_(0, places, blocks[:, begin:end])
            begin = end
