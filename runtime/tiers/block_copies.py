"""Copies blocks between the tensors of a KV cache and host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

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

    def __init__(
        self, pool: KVPool, states: StatePool | None, synchronize: Callable[[], None]
    ) -> None:
        self._synchronize = synchronize
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
        self._kinds = [_as_rows(tensors) for tensors in self._kinds]
        self.num_bytes = [
            sum(each.shape[1] * each.itemsize for each in tensors) for tensors in self._kinds
        ]

    def wait(self) -> None:
        """Wait for the steps launched before. `read` then takes the time of copying alone."""
        self._synchronize()

    def read(self, kind: int, numbers: Sequence[int]) -> torch.Tensor:
        """Return the blocks [n, bytes] uint8 in host memory, after the steps launched before."""
        tensors, size = self._kinds[kind], self.num_bytes[kind]
        if not tensors:
            return torch.empty(len(numbers), 0, dtype=torch.uint8)
        device = tensors[0].device
        places = torch.tensor(numbers, device=device)
        blocks = torch.empty(len(numbers), size, dtype=torch.uint8, device=device)
        for tensor, part in _parts(tensors, blocks):
            torch.index_select(tensor, 0, places, out=part)
        return blocks.cpu()

    def write(self, kind: int, numbers: Sequence[int], blocks: torch.Tensor) -> None:
        """Write blocks [n, bytes] uint8 before the steps that are launched later."""
        tensors = self._kinds[kind]
        if not tensors:
            return
        places = torch.tensor(numbers, device=tensors[0].device)
        for tensor, part in _parts(tensors, blocks.to(tensors[0].device)):
            tensor.index_copy_(0, places, part)


def _as_rows(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return views [blocks, words of one] of tensors of any dtype.

    A word has 8 bytes if all rows have whole words: torch copies rows of single bytes one byte at
    a time, which takes 7 times as long.
    """
    rows = [tensor.view(torch.uint8).view(len(tensor), -1) for tensor in tensors]
    if any(each.shape[1] % 8 or each.storage_offset() % 8 for each in rows):
        return rows
    return [each.view(torch.int64) for each in rows]


def _parts(
    tensors: Sequence[torch.Tensor], blocks: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each tensor with its columns of `blocks` [n, bytes]."""
    words, begin = blocks.view(tensors[0].dtype), 0
    for tensor in tensors:
        end = begin + tensor.shape[1]
        yield tensor, words[:, begin:end]
        begin = end
