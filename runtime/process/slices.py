"""Short time slices for a process whose threads wait for one another many times a step.

A thread that wakes up normally waits until the program on its core has used its slice, about 3 ms.
Since Linux 6.12, a thread with a shorter slice does not wait for that. Its share of the core stays
the same.
"""

from __future__ import annotations

import ctypes
import platform
import sys

SLICE_NANOSECONDS = 100_000  # The shortest that Linux allows.
# Numbers of the system calls sched_setattr(2) and sched_getattr(2).
_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}
_SCHED_OTHER = 0


class _SchedAttr(ctypes.Structure):
    """The first version of Linux's struct sched_attr."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def shorten_slices() -> None:
    """Give this thread, and threads that it starts later, short slices.

    Do nothing if the system does not allow it, or if the user has chosen a scheduling policy.
    """
    attributes = _attributes()
    if attributes is None or attributes.policy != _SCHED_OTHER:
        return
    attributes.runtime = SLICE_NANOSECONDS
    set_attributes, _ = _CALLS[platform.machine()]
    ctypes.CDLL(None).syscall(set_attributes, 0, ctypes.byref(attributes), 0)


def slice_nanoseconds(thread: int = 0) -> int:
    """Return the slice of a thread (0: of this one), or 0 if the system does not tell it."""
    attributes = _attributes(thread)
    return 0 if attributes is None else int(attributes.runtime)


def _attributes(thread: int = 0) -> _SchedAttr | None:
    if sys.platform != "linux" or platform.machine() not in _CALLS:
        return None
    attributes, (_, get) = _SchedAttr(), _CALLS[platform.machine()]
    size = ctypes.sizeof(attributes)
    failed = ctypes.CDLL(None).syscall(get, thread, ctypes.byref(attributes), size, 0)
    return None if failed else attributes
