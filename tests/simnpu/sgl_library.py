"""A stand-in of sgl-kernel-npu: one function, called by the signature that its source has."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from piecework.kernels.npu import refusals, sgl_kernels
from piecework.kernels.npu.platform import NpuPlatform

_CONTRACT = json.loads(
    (Path(__file__).parents[1] / "npu_contract" / "sgl_kernel_npu.json").read_text()
)


def signature_of(module: str, name: str) -> inspect.Signature:
    """Return the signature of a function of the library's module, such as `norm.x`."""
    found = _CONTRACT["signatures"][f"sgl_kernel_npu.{module}.{name}"]
    return inspect.signature(eval(f"lambda {found}: None"))


def install(
    monkeypatch: pytest.MonkeyPatch, module: str, name: str, made: Callable[..., Any]
) -> None:
    """Install the library with `made` as a function of its module, until the test ends."""
    parts = f"sgl_kernel_npu.{module}".split(".")
    for length in range(1, len(parts) + 1):
        path = ".".join(parts[:length])
        found = ModuleType(path)
        found.__spec__ = ModuleSpec(path, None, is_package=True)
        monkeypatch.setitem(sys.modules, path, found)
    setattr(sys.modules[path], name, made)
    # Nothing of another test's library.
    monkeypatch.setattr(sgl_kernels, "function", sgl_kernels.function.__wrapped__)
    monkeypatch.setattr(refusals, "refused", {})
    NpuPlatform().set_up(None)
