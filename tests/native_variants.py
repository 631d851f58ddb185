"""The variants of the native CPU kernels that this machine's compiler can make and its CPU can
run.
"""

from __future__ import annotations

from functools import cache

from piecework.kernels.cpu.native import build


@cache
def native_variants() -> list[build.Variant]:
    """The best first. Older compilers lack the flags of newer CPUs."""
    made = []
    for variant in build.runnable_variants():
        try:
            build.load_variant(variant)
        except OSError:
            continue
        made.append(variant)
    return made
