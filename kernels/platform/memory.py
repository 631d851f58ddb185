"""The memory that tensors of a device are allocated from."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..memory_info import MemoryInfo
from .device import Device


class MemoryUse(NamedTuple):
    """Bytes that this process holds, now and at the peak: in tensors (allocated), and including
    what the allocator keeps for later (reserved).
    """

    allocated: int
    peak_allocated: int
    reserved: int
    peak_reserved: int


class Memory(Device):
    """The memory of a device.

    free = memory.memory().free
    pages = memory.zeros((free // 2,), torch.uint8)
    """

    # Whether tensors of the device lie in another memory than those of the CPU.
    has_own_memory: bool = True
    ranks_share_memory: bool = False  # Whether all ranks of a machine allocate from one memory.

    # Whether memory can be freed and used again at the same addresses (`discard`).
    keeps_addresses: bool = False

    def memory(self) -> MemoryInfo:
        raise NotImplementedError

    def memory_use(self) -> MemoryUse:
        raise NotImplementedError

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether an allocation failed, so that less work at a time may succeed."""
        return isinstance(error, torch.OutOfMemoryError | MemoryError)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a large tensor of zeros, much of which may never be touched."""
        return torch.zeros(*shape, dtype=dtype, device=self.device())

    def discard(self, tensors: Sequence[torch.Tensor]) -> None:
        """Free the memory of tensors, which keep their addresses and lose their contents.

        They must be written before they are read, except large ones of `zeros`, which are zeros
        again. Only for platforms with `keeps_addresses`.
        """
        raise NotImplementedError

    def empty_cache(self) -> None:
        """Return unused memory to the device."""

    def give_back_memory(self) -> None:
        """Return freed host memory to the system. Loading and steps use host memory on every
        device.

        glibc's allocator keeps freed heap memory below a block that is in use. Device memory stays
        allocated for the next step.
        """
        if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
            trim(ctypes.c_size_t(0))
