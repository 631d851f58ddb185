"""What an allocator keeps of freed memory can be given back to the system."""

from __future__ import annotations

import ctypes
import sys
from typing import NoReturn

import psutil
import pytest

from piecework.kernels.cpu.platform import CpuPlatform
from piecework.kernels.platform import memory as memory

MIB = 2**20


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"),
    reason="an allocator that is not glibc's",
)
def test_freed_memory_below_something_in_use_is_given_back() -> None:
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    blocks = [ctypes.c_void_p(library.malloc(ctypes.c_size_t(64 * 1024))) for _ in range(1000)]
    for block in blocks:
        ctypes.memset(block, 1, 64 * 1024)
    for block in blocks[:-1]:
        library.free(block)
    before = psutil.Process().memory_info().rss
    CpuPlatform().give_back_memory()
    assert psutil.Process().memory_info().rss < before - 40 * MIB
    library.free(blocks[-1])


def test_an_allocator_that_has_no_such_function_keeps_what_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory.sys, "platform", "linux")
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: object())
    CpuPlatform().give_back_memory()


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_other_systems_are_not_asked_for_it(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows has no library without a name."""

    def refuse(name: str | None) -> NoReturn:
        raise TypeError(f"a library of {name}")

    monkeypatch.setattr(memory.sys, "platform", system)
    monkeypatch.setattr(memory.ctypes, "CDLL", refuse)
    CpuPlatform().give_back_memory()
