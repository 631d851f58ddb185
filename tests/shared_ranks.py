"""Ranks over one shared memory, as threads of one process or as a process beside it."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from piecework.kernels.cpu.native.build import load_kernels
from piecework.kernels.cpu.native.shared import SharedMemoryGroup, region_bytes

T = TypeVar("T")


def shared_groups(
    size: int, *, seconds: float = 20.0, is_crowded: bool = False, library: object = None
) -> list[SharedMemoryGroup]:
    """The group as each of its ranks sees it."""
    library = library or load_kernels()
    memory = mmap.mmap(-1, region_bytes(library, size))
    return [
        SharedMemoryGroup(library, memory, rank, size, seconds=seconds, is_crowded=is_crowded)
        for rank in range(size)
    ]


def at_once(size: int, run: Callable[[int], T]) -> list[T]:
    """What `run(rank)` returns on each rank."""
    with ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(run, rank) for rank in range(size)]]
