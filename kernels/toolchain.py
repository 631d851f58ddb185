"""The version and kind of this machine's C++ compiler. Compiled code depends on them."""

from __future__ import annotations

import subprocess
from functools import cache

_SECONDS = 30  # Timeout for a compiler to report its version.


@cache
def version_of(compiler: str) -> str | None:
    """Return the first line of `compiler --version`, such as "g++ (Debian 12.2.0-14) 12.2.0", or
    None if it prints nothing.
    """
    try:
        output = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, timeout=_SECONDS
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return output.partition("\n")[0] or None


@cache
def is_clang(compiler: str) -> bool:
    """Return whether the compiler at this path is clang under any name, such as Intel's icpx."""
    command = [compiler, "-dM", "-E", "-x", "c++", "-"]
    try:
        macros = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return False
    return " __clang__ " in macros
