"""Calls Triton kernels of sgl-kernel-npu, which is not on PyPI and may be missing."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def obstacle() -> str | None:
    """Return why the library cannot be used, or None if it is installed. Nothing is imported."""
    try:
        found = find_spec("sgl_kernel_npu") is not None
    except ValueError:  # A module without a spec.
        found = True
    return None if found else "sgl-kernel-npu is not installed"


def launch(module: str, name: str, **arguments: Any) -> Any:
    """Call a function of the library. Raise `RuntimeError` for whatever it raises."""
    try:
        return function(module, name)(**arguments)
    except RuntimeError:
        raise
    except Exception as error:
        # Triton raises errors of any type if it cannot compile a kernel.
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


@cache
def function(module: str, name: str) -> Any:
    return getattr(import_module(f"sgl_kernel_npu.{module}"), name)
