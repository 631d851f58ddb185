"""Memory on huge pages, where Linux lends them: a decode reads each weight once, and finding pages
of 4 KiB takes a good part of the time of reading them.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from math import prod
from threading import Lock

import torch

_HUGE_PAGE = 2 * 2**20
_MADV_HUGEPAGE = 14
"""Of Linux, whose Python may have been built without it."""
_SLAB = 16 * _HUGE_PAGE
_LINE = 64
"""Bytes at multiples of which weights begin: a line of the cache."""


def on_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, whose memory nobody has written yet, so that it gets huge pages when somebody
    does. Where the system has none, or refuses, it stays as it is.
    """
    if sys.platform == "linux":
        begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = tensor.data_ptr() + tensor.numel() * tensor.element_size()
        if end - begin >= _HUGE_PAGE:
            advise = ctypes.CDLL(None).madvise
            advise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_HUGEPAGE)
    return tensor


class Slabs:
    """Memory for many weights, one after another, for most are smaller than a huge page. A slab
    lives as long as one of its weights.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._left = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: tuple[int, ...]) -> torch.Tensor:
        """uint8, not written, from the beginning of a line on."""
        size = prod(shape)
        taken = -(-size // _LINE) * _LINE
        with self._lock:
            if taken > len(self._left):
                slab = on_huge_pages(torch.empty(max(taken, _SLAB), dtype=torch.uint8))
                if taken >= _SLAB:  # the one that is open goes on
                    return slab[:size].view(shape)
                self._left = slab
            found, self._left = self._left[:size], self._left[taken:]
        return found.view(shape)
