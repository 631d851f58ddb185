"""The tensors that hold keys and values, in pages."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...kernels.attention import KVLayout
from ...kernels.platform import Platform

RESERVED_PAGE = 0
"""Never handed out: tokens that only pad a batch write here, and block tables are padded with it.
"""


def page_bytes(layouts: Sequence[KVLayout], page_size: int) -> int:
    """Bytes that one page takes over all layers."""
    return page_size * sum(layout.token_bytes for layout in layouts)


class KVPool:
    """Keys and values of every layer, as `layouts` has it: `k[layer]` is [pages, page size,
    key/value heads, key size], `v[layer]` the same with the value size.

    Zeroed, because attention multiplies what padding reads by a weight of 0, and 0 * NaN is NaN.
    """

    def __init__(
        self, layouts: Sequence[KVLayout], *, num_pages: int, page_size: int, platform: Platform
    ) -> None:
        self.layouts = list(layouts)
        self.num_pages, self.page_size = num_pages, page_size
        self.num_bytes = num_pages * page_bytes(layouts, page_size)
        shapes = [
            (layout.dtype, (num_pages, page_size, layout.num_kv_heads, size))
            for layout in layouts
            for size in (layout.key_size, layout.value_size)
        ]
        # One allocation a dtype: an allocator may round each of many up.
        rest = {
            dtype: platform.zeros((sum(math.prod(s) for d, s in shapes if d == dtype),), dtype)
            for dtype in {layout.dtype for layout in layouts}
        }
        tensors = []
        for dtype, shape in shapes:
            part, rest[dtype] = rest[dtype].tensor_split([math.prod(shape)])
            tensors.append(part.view(shape))
        self.k, self.v = tensors[::2], tensors[1::2]
