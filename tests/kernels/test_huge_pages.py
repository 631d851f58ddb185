"""Memory on huge pages: asked for where Linux has them, never needed."""

from __future__ import annotations

import ctypes
import gc
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from piecework.kernels.cpu.machine.huge_pages import Slabs, on_huge_pages

MIB = 2**20


def has_flag(tensor: torch.Tensor, flag: str) -> bool:
    """Whether the mapping that holds the middle of a tensor has this flag (proc(5), VmFlags)."""
    middle, inside = tensor.data_ptr() + tensor.numel() // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            begin, end = (int(place, 16) for place in words[0].split("-"))
            inside = begin <= middle < end
        elif inside and words[0] == "VmFlags:":
            return flag in words
    return False


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without huge pages"
)
def test_large_memory_is_on_huge_pages() -> None:
    assert has_flag(on_huge_pages(torch.empty(8 * MIB, dtype=torch.uint8)), "hg")
    assert has_flag(Slabs().empty((300, 1000)), "hg")


@given(st.lists(st.integers(0, 12 * MIB) | st.integers(30 * MIB, 34 * MIB), max_size=12))
def test_no_weight_lies_on_another_one(sizes: list[int]) -> None:
    slabs = Slabs()
    weights = [slabs.empty((1, size)) for size in sizes]
    assert [weight.shape for weight in weights] == [(1, size) for size in sizes]
    places = sorted((weight.data_ptr(), weight.numel()) for weight in weights if weight.numel())
    assert all(place % 64 == 0 for place, _ in places)
    for (place, size), (following, _) in pairwise(places):
        assert place + size <= following


def test_a_weight_outlives_its_slab_and_its_neighbours() -> None:
    slabs = Slabs()
    first, second = slabs.empty((64, 1024)).fill_(1), slabs.empty((64, 1024)).fill_(2)
    del first, slabs
    gc.collect()
    assert second.eq(2).all()


def test_a_system_that_refuses_gives_plain_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Refusing:
        def madvise(self, *arguments: Any) -> int:
            asked.append(arguments)
            return -1

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Refusing())
    assert on_huge_pages(torch.empty(4 * MIB, dtype=torch.uint8)).fill_(3).eq(3).all()
    assert len(asked) == 1


def test_other_systems_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(ctypes, "CDLL", None)
    assert Slabs().empty((4, MIB)).fill_(3).eq(3).all()
