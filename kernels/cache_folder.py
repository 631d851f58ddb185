"""Where everything lies that is made once on a machine and kept: compiled pieces and native kernels."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Where the cache lies: $PIECEWORK_CACHE_DIR, or `piecework` in the user's cache folder."""
    if chosen := os.environ.get("PIECEWORK_CACHE_DIR"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "piecework"


def kernels_folder() -> Path:
    """Where the native kernels lie, which belong to the machine and not to a model: $PIECEWORK_KERNELS_DIR, or in the cache."""
    if chosen := os.environ.get("PIECEWORK_KERNELS_DIR"):
        return Path(chosen).expanduser()
    return cache_folder() / "native"
