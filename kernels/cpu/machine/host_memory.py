"""The memory that the machine has, and has free, for this process."""

from __future__ import annotations

import psutil

from ...memory_info import MemoryInfo
from .cgroups import memory_limit


def host_memory() -> MemoryInfo:
    """Return the host's memory, or what the control group of this process leaves of it."""
    memory = psutil.virtual_memory()
    host, group = MemoryInfo(free=memory.available, total=memory.total), memory_limit()
    if group is None:
        return host
    return MemoryInfo(min(host.free, group.free), min(host.total, group.total))
