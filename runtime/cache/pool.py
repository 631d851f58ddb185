"""The tensors that hold keys and values, in pages."""

from __future__ import annotations

import torch


class KVPool:
    """Keys and values of every layer: `k[layer]`, `v[layer]` are [pages, page size, key/value heads, head size].

    Zeroed, because attention multiplies what padding reads by a weight of 0, and 0 * NaN is NaN.
    """

    def __init__(
        self, *, num_layers: int, num_pages: int, page_size: int, num_kv_heads: int, head_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        shape = (2, num_layers, num_pages, page_size, num_kv_heads, head_size)
        self._storage = torch.zeros(shape, dtype=dtype, device=device)
        self.k = list(self._storage[0].unbind())
        self.v = list(self._storage[1].unbind())

    @property
    def num_bytes(self) -> int:
        return self._storage.nbytes


def page_bytes(*, num_layers: int, page_size: int, num_kv_heads: int, head_size: int, dtype: torch.dtype) -> int:
    """Bytes that one page takes over all layers."""
    return 2 * num_layers * page_size * num_kv_heads * head_size * dtype.itemsize
