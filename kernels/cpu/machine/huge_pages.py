"""Memory on huge pages, if Linux provides them. A decode reads each weight once, and translating
addresses of 4 KiB pages takes a considerable part of that time.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from math import prod
from threading import Lock

import torch

_HUGE_PAGE = 2 * 2**20
_MADV_HUGEPAGE = 14  # Linux's value. Python may have been built without it.
_SLAB = 16 * _HUGE_PAGE
_LINE = 64  # Weights begin at multiples of a cache line, in bytes.


def on_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Ask for huge pages for a tensor that was not written yet, and return it. If the system
    refuses, the tensor stays as it is.
    """
    if sys.platform == "linux":
        begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = tensor.data_ptr() + tensor.numel() * tensor.element_size()
        if end - begin >= _HUGE_PAGE:
            advise = ctypes.CDLL(None).madvise
            advise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_HUGEPAGE)
    return tensor


class Slabs:
    """Memory for many weights, one after another, because most are smaller than a huge page. A slab
    lives as long as one of its weights.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._left = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return uninitialised uint8 memory that begins at a cache line."""
        size = prod(shape)
        taken = -(-size // _LINE) * _LINE
        with self._lock:
            if taken > len(self._left):
                slab = on_huge_pages(torch.empty(max(taken, _SLAB), dtype=torch.uint8))
                if taken >= _SLAB:  # The open slab stays open.
                    return slab[:size].view(shape)
                self._left = slab
            found, self._left = self._left[:size], self._left[taken:]
        return found.view(shape)
