"""Small file systems to fill up, to freeze."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A small file system of its own; skips where that is not allowed."""
    folder.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True
    )
    if mount.returncode != 0:
        pytest.skip(f"no file system can be mounted: {mount.stderr.strip()}")
    try:
        yield folder
    finally:
        # At once, though a library may be mapped from it.
        subprocess.run(["umount", "--lazy", folder], check=True)
