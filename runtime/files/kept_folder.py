"""Folders that a server keeps after its end. One process uses a folder at a time."""

from __future__ import annotations

import re
from pathlib import Path

from ...kernels.cache_folder import cache_folder, hold_lock

__all__ = ["hold_lock", "kept_folder"]


def kept_folder(kind: str, name: str) -> Path:
    """Return the folder of one kind of data of the model `name`. It may not exist yet."""
    file_name = re.sub(r"[^\w.-]", "_", name)[:100].strip(".")
    return cache_folder() / kind / (file_name or "model")
