"""The free memory of the machine and the memory of processes, without torch or a `Platform`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import ClassVar

import psutil

from ...kernels.cpu.machine.host_memory import host_memory


def free_memory() -> int:
    """Return the bytes that this process may still allocate, limited by its control group too."""
    return host_memory().free


def resident_memory(pids: Sequence[int]) -> int:
    """Return the resident bytes of processes and their descendants. Ended processes count 0.

    Shared memory, such as that of libraries, is counted for each process.
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


class _Mallinfo2(ctypes.Structure):
    """The result of glibc's `mallinfo2`."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def allocated_memory() -> int | None:
    """Return the bytes that all threads of this process have allocated and not freed.

    Return None if the C library has no `mallinfo2`.
    """
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):
        return None
    ask.restype = _Mallinfo2
    figures = ask()
    return int(figures.uordblks + figures.hblkhd)
