"""The variants of the native CPU kernels that this machine's compiler can make and its CPU can
run.
"""

from __future__ import annotations

import os
from functools import cache

from piecework.kernels.cpu.native import build

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
