"""Which C++ compiler this machine has, as what it compiles depends on it."""

from __future__ import annotations

import subprocess
from functools import cache

_SECONDS = 30
"""A compiler that has not said by then what it is says nothing."""


@cache
def version_of(compiler: str) -> str | None:
    """What the compiler at this path says of itself, such as "g++ (Debian 12.2.0-14) 12.2.0"; None
    where it says nothing.
    """
    try:
        told = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, timeout=_SECONDS
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return told.partition("\n")[0] or None


@cache
def is_clang(compiler: str) -> bool:
    """Whether the compiler at this path is clang, by whatever name, such as Intel's icpx."""
    command = [compiler, "-dM", "-E", "-x", "c++", "-"]
    try:
        macros = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return False
    return " __clang__ " in macros
