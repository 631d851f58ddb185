"""The tensors that hold keys and values, in pages."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...kernels.platform import Platform


class KVShape(NamedTuple):
    """What a model keeps for every token."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype


class KVPool:
    """Keys and values of every layer: `k[layer]`, `v[layer]` are [pages, page size, key/value
    heads, head size].

    Zeroed, because attention multiplies what padding reads by a weight of 0, and 0 * NaN is NaN.
    """

    def __init__(
        self, shape: KVShape, *, num_pages: int, page_size: int, platform: Platform
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        size = (2, shape.num_layers, num_pages, page_size, shape.num_kv_heads, shape.head_size)
        self._storage = platform.zeros(size, shape.dtype)
        self.k = list(self._storage[0].unbind())
        self.v = list(self._storage[1].unbind())

    @property
    def num_bytes(self) -> int:
        return self._storage.nbytes


def page_bytes(*, page_size: int, shape: KVShape) -> int:
    """Bytes that one page takes over all layers."""
    return (
        2
        * shape.num_layers
        * page_size
        * shape.num_kv_heads
        * shape.head_size
        * shape.dtype.itemsize
    )
