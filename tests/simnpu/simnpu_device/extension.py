"""Holds the loaded C++ extension, so that modules can be imported before it is built."""

from __future__ import annotations

from functools import cache
from types import ModuleType

from . import build


@cache
def extension() -> ModuleType:
    """The C++ extension; the first call builds or loads it, which makes torch know the device."""
    return build.load()
