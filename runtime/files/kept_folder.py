"""Folders for what a server keeps beyond its own life, one process at a time."""

from __future__ import annotations

import re
from pathlib import Path

from ...kernels.cache_folder import cache_folder, hold_lock

__all__ = ["hold_lock", "kept_folder"]


def kept_folder(kind: str, name: str) -> Path:
    """Of one kind of thing, and of the model that is served under `name`; it need not be there."""
    file_name = re.sub(r"[^\w.-]", "_", name)[:100].strip(".")
    return cache_folder() / kind / (file_name or "model")
