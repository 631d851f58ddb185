"""The type in which devices, machines and control groups report their memory. Imports no torch."""

from __future__ import annotations

from typing import NamedTuple


class MemoryInfo(NamedTuple):
    """Bytes of the memory that weights and KV cache live in."""

    free: int
    total: int
