"""What a device, a machine or a control group says of its memory. Imports no torch."""

from __future__ import annotations

from typing import NamedTuple


class MemoryInfo(NamedTuple):
    """Bytes of the memory that weights and KV cache live in."""

    free: int
    total: int
