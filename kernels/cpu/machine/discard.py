"""Gives the memory of tensors back to the system while their addresses stay valid."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable

import torch

_MADV_DONTNEED = 4


def discard(tensors: Iterable[torch.Tensor]) -> None:
    """Free the whole pages of the tensors' memory, on Linux.

    The tensors lose their contents: anonymous memory reads as zeros.
    """
    advise = ctypes.CDLL(None).madvise
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
    page = mmap.PAGESIZE
    for begin, storage in storages.items():
        first = -(-begin // page) * page
        length = (begin + storage.nbytes()) // page * page - first
        if length > 0:
            advise(ctypes.c_void_p(first), ctypes.c_size_t(length), _MADV_DONTNEED)
