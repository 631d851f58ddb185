"""The variants of the native CPU kernels that this machine's compiler can make and its CPU can
run.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import CDLL
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from piecework.kernels.attention import AttentionBackend
from piecework.kernels.cpu.native import build, compiler
from piecework.kernels.cpu.native.attention import NativeAttention

needs_kernels = pytest.mark.usefixtures("native_kernels")

_USUAL = ("avx2", "neon", "portable")
"""Tested beside the best one, compiled in half the time; the long run has all as users get them."""
_QUICKLY = ("-O1",)
_FEW_KINDS = ("bfloat16", "Q8_0", "Q4_1", "Q4_K")
"""Kinds of weights that the default run tests on variants beside the best one. Each kind is a part,
which takes seconds to compile for each variant.
"""


@cache
def native_variants() -> list[build.Variant]:
    """The best first, of those that the compiler has the flags for: tests are collected by them,
    and none is compiled before `built` is asked for it.
    """
    runnable = build.runnable_variants()
    # Without a compiler, too, there is one: its tests say what is missing.
    made = [variant for variant in runnable if _has_flags(variant)] or runnable[-1:]
    if "EVERY_NATIVE_VARIANT" in os.environ:
        return made
    best, *others = made
    usual = (variant for variant in others if variant.name in _USUAL)
    return [best, *(other._replace(flags=(*other.flags, *_QUICKLY)) for other in usual)]


def kinds_of(variant: build.Variant, kinds: list[str]) -> list[str]:
    """Return those of `kinds` whose products are tested on a variant: all on the best one."""
    is_usual = variant == native_variants()[0] or "EVERY_NATIVE_VARIANT" in os.environ
    return kinds if is_usual else [kind for kind in kinds if kind in _FEW_KINDS]


def mostly_best() -> list[Any]:
    """Return all variants as parameters. Those beside the best one are marked slow.

    It is for tests of parts that no other test compiles for each variant.
    """
    best, *others = native_variants()
    slow = [pytest.param(each, marks=pytest.mark.slow, id=each.name) for each in others]
    return [pytest.param(best, id=best.name), *slow]


def variants_with(kinds: list[str]) -> list[Any]:
    """Return parameters (variant, kind). Those that are not of `kinds_of` are marked slow."""
    return [
        pytest.param(
            *(variant, kind),
            marks=[] if kind in kinds_of(variant, kinds) else [pytest.mark.slow],
            id=f"{kind}-{variant.name}",
        )
        for variant, kind in product(native_variants(), kinds)
    ]


def built(variant: build.Variant) -> CDLL:
    """Compiled by the first test that asks for it. Skips the test where that cannot be."""
    library = _built(variant)
    if isinstance(library, OSError):
        pytest.skip(f"no {variant.name} kernels: {library}")
    return library


@cache
def built_variants() -> list[CDLL]:
    """All that can be, the best first. Skips the test where that is none."""
    made = [_built(variant) for variant in native_variants()]
    libraries = [library for library in made if not isinstance(library, OSError)]
    return libraries or [built(native_variants()[0])]


def _has_flags(variant: build.Variant) -> bool:
    try:
        return compiler.has_flags(variant)
    except OSError:
        return False


@cache
def _built(variant: build.Variant) -> CDLL | OSError:
    """Kept either way: what failed takes as long again."""
    with _untimed():
        try:
            return build.load_variant(variant)
        except OSError as error:
            return error


@contextmanager
def _untimed() -> Iterator[None]:
    """Stops pytest-timeout's clock: a build has limits of its own, and no test is slow because it
    was the first to need one.
    """
    left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left)


class AttentionWay(NativeAttention):
    """Whose blocks of rows are multiplied in one way (`Way` of linear.h)."""

    def __init__(self, library: CDLL, way: int) -> None:
        super().__init__(library)
        self.library, self.way = library, way

    def _attend(self, *given: Any) -> None:
        self.library.piecework_choose_way(self.way)
        try:
            super()._attend(*given)
        finally:
            self.library.piecework_choose_way(-1)


def errors_of(backend: AttentionBackend, dtype: torch.dtype) -> dict[str, float]:
    """What rounding results to `dtype` explains, and weights but for FMAs of float32."""
    if dtype == torch.float32:
        return {"atol": 1e-5, "rtol": 1e-5}
    loose = 1 if isinstance(backend, AttentionWay) and backend.way == 0 else 8
    return {"atol": loose * 1e-3, "rtol": loose * 2**-8}


def ways_of_others() -> list[AttentionWay]:
    """The ways of the variants beside the best one."""
    best = built(native_variants()[0])
    return [way for way in attention_ways() if way.library is not best]


def best_ways() -> list[AttentionWay]:
    best = built(native_variants()[0])
    return [way for way in attention_ways() if way.library is best]


@cache
def attention_ways() -> list[AttentionWay]:
    """Every variant by FMAs of float32, then those that have them by dot products of bfloat16."""
    libraries = built_variants()
    dots = [library for library in libraries if library.piecework_choose_way(1)]
    for library in dots:
        library.piecework_choose_way(-1)
    return [AttentionWay(*each) for each in (*product(libraries, [0]), *product(dots, [1]))]
