"""How much memory the machine has, and has left, for this process, and what this process can do
without.
"""

from __future__ import annotations

import ctypes
import sys

import psutil

from ..memory_info import MemoryInfo
from .cgroups import memory_limit


def host_memory() -> MemoryInfo:
    """The host's memory, or what is left of it for this process's control group."""
    memory = psutil.virtual_memory()
    host, group = MemoryInfo(free=memory.available, total=memory.total), memory_limit()
    if group is None:
        return host
    return MemoryInfo(min(host.free, group.free), min(host.total, group.total))


def give_back_memory() -> None:
    """What was freed leaves the process, where its allocator keeps it: glibc's keeps what lies in
    its heap below something in use.
    """
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(ctypes.c_size_t(0))
