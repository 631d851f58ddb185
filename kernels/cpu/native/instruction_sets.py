"""The instruction sets of this CPU, by Linux's names for its architecture."""

from __future__ import annotations

import ctypes
import platform
import sys
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
# macOS's names under `hw.optional.arm`, and Linux's names, of what the kernels are compiled for.
_OF_APPLE = {
    "FEAT_FP16": "asimdhp",
    "FEAT_DotProd": "asimddp",
    "FEAT_BF16": "bf16",
    "FEAT_I8MM": "i8mm",
}


def instruction_sets() -> frozenset[str]:
    """Return the instruction sets by Linux's names, or none if they cannot be determined."""
    if sys.platform == "darwin":
        if platform.machine() != "arm64":
            return frozenset()
        found = {name for apple, name in _OF_APPLE.items() if _sysctl(f"hw.optional.arm.{apple}")}
        return frozenset({"asimd", *found})
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(
        next(
            (
                line.partition(":")[2].split()
                for line in lines
                if line.startswith(("flags", "Features"))
            ),
            [],
        )
    )


def _sysctl(name: str) -> int:
    """Return a number from macOS's sysctl, or 0 for an unknown name."""
    value, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    tell = ctypes.CDLL(None).sysctlbyname
    failed = tell(name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
    return 0 if failed else value.value
