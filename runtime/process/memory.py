"""What is free of the machine's memory, and what processes take of it, for a process without torch,
which has no `Platform` to ask.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import ClassVar

import psutil

from ...kernels.cpu.machine.host_memory import host_memory


def free_memory() -> int:
    """Bytes that this process may still take, by the machine and by its control group."""
    return host_memory().free


def resident_memory(pids: Sequence[int]) -> int:
    """Bytes that processes and those that they started have in memory; one that has ended has none.
    What they share, such as libraries, is counted for each.
    """
    return sum(_resident(each) for pid in pids for each in _family(pid))


def _family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


class _Figures(ctypes.Structure):
    """What glibc's `mallinfo2` gives."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def allocated_memory() -> int | None:
    """Bytes that the process has allocated and not freed; None where its C library does not tell.
    What other threads allocate is counted too.
    """
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):
        return None
    ask.restype = _Figures
    figures = ask()
    return int(figures.uordblks + figures.hblkhd)
