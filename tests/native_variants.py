"""The variants of the native CPU kernels that this machine's compiler can make and its CPU can
run.
"""

from __future__ import annotations

import os
from ctypes import CDLL
from functools import cache
from itertools import product
from typing import Any

import torch

from piecework.kernels.attention import AttentionBackend
from piecework.kernels.cpu.native import build
from piecework.kernels.cpu.native.attention import NativeAttention

_USUAL = ("avx2", "neon", "portable")
"""Tested beside the best one; the long run has all: a build takes the better part of a minute."""


@cache
def native_variants() -> list[build.Variant]:
    """The best first. Older compilers lack the flags of newer CPUs."""
    made = list[build.Variant]()
    for variant in build.runnable_variants():
        if made and variant.name not in _USUAL and "EVERY_NATIVE_VARIANT" not in os.environ:
            continue
        try:
            build.load_variant(variant)
        except OSError:
            continue
        made.append(variant)
    return made


class AttentionWay(NativeAttention):
    """Whose blocks of rows are multiplied in one way (`Way` of linear.h)."""

    def __init__(self, library: CDLL, way: int) -> None:
        super().__init__(library)
        self._library, self.way = library, way

    def run(self, *given: Any) -> None:
        self._library.piecework_choose_way(self.way)
        try:
            super().run(*given)
        finally:
            self._library.piecework_choose_way(-1)


def errors_of(backend: AttentionBackend, dtype: torch.dtype) -> dict[str, float]:
    """What rounding results to `dtype` explains, and weights but for FMAs of float32."""
    if dtype == torch.float32:
        return {"atol": 1e-5, "rtol": 1e-5}
    loose = 1 if isinstance(backend, AttentionWay) and backend.way == 0 else 8
    return {"atol": loose * 1e-3, "rtol": loose * 2**-8}


@cache
def attention_ways() -> list[AttentionWay]:
    """Every variant by FMAs of float32, then those that have them by dot products of bfloat16."""
    libraries = [build.load_variant(variant) for variant in native_variants()]
    dots = [library for library in libraries if library.piecework_choose_way(1)]
    for library in dots:
        library.piecework_choose_way(-1)
    return [AttentionWay(*each) for each in (*product(libraries, [0]), *product(dots, [1]))]
