"""The CPU as a platform."""

from __future__ import annotations

import os

import psutil
import torch

from ..attention import AttentionBackend
from ..paged_attention import TorchAttention
from ..platform import MemoryInfo, Platform


class CpuPlatform(Platform):
    """Plain torch on the host's memory."""

    device_type = "cpu"
    dispatch_key = "CPU"
    default_max_running_requests = 64
    # The rest of the host's memory is other people's: the page cache, the web process, other servers.
    default_mem_fraction = 0.2

    def set_up(self, num_threads: int | None) -> None:
        torch.set_num_threads(num_threads or len(os.sched_getaffinity(0)))

    def memory(self) -> MemoryInfo:
        memory = psutil.virtual_memory()
        return MemoryInfo(free=memory.available, total=memory.total)

    def attention_backend(self) -> AttentionBackend:
        return TorchAttention()
