"""`Platform`: everything that differs between devices, one class to override, chosen once by `detect`."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .attention import AttentionBackend


class MemoryInfo(NamedTuple):
    """Bytes of the memory that weights and KV cache live in."""

    free: int
    total: int


class Platform:
    """One kind of device. Subclasses override what differs; nobody else asks what machine this is."""

    device_type: str
    dispatch_key: str
    """Where `torch.library` registers our custom ops."""
    slot_dtype: torch.dtype = torch.int64
    """dtype of slot mappings and page numbers."""
    default_dtype: torch.dtype = torch.bfloat16
    default_page_size: int = 16
    default_chunked_prefill_size: int = 2048
    default_max_running_requests: int = 256
    default_mem_fraction: float = 0.88

    def device(self) -> torch.device:
        return torch.device(self.device_type)

    def set_up(self, num_threads: int | None) -> None:
        """Called once in the engine process before anything is allocated."""

    def memory(self) -> MemoryInfo:
        raise NotImplementedError

    def synchronize(self) -> None:
        """Wait until everything that was launched has run."""

    def attention_backend(self) -> AttentionBackend:
        raise NotImplementedError
