"""The free memory of the machine and the memory of processes, without torch or a `Platform`."""

from __future__ import annotations

import contextlib
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
    size = 0
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            for each in [process, *process.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    size += each.memory_info().rss
    return size


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
