"""Tile sizes that all wrappers of kernels between matrix products share."""

from __future__ import annotations

BLOCK = 1024  # Elements of a program if a row has several programs.


def power_of_2(number: int) -> int:
    """Return the least power of 2 that is not below `number`."""
    return 1 << max(0, number - 1).bit_length()


def warps(size: int) -> int:
    """Return the warps for which each thread has about eight elements, 16 bytes of bfloat16."""
    return min(16, max(1, power_of_2(size) // 256))
