"""Put the kernels into the package, compiled for every CPU of this architecture: `python -m
piecework.kernels.cpu.native.ship`.

What is installed from it (a wheel, an image) starts without a compiler and without a build. A file
is taken only with the very sources it was made of, so sources that change are built as ever.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence

from ...toolchain import is_clang
from .build import VARIANTS, Variant, compile_variant, find_compiler, shipped_library
from .openmp import OpenMP

_OPENMP = OpenMP(("-fopenmp",))
"""Linked to none, for where torch's lies is known only where the package is installed."""
_ARCHITECTURES = {"x86_64": "avx2", "aarch64": "asimd"}
"""What all variants of an architecture need, under Linux's names."""


def main(argv: Sequence[str] | None = None) -> int:
    needed = _ARCHITECTURES.get(platform.machine()) if sys.platform == "linux" else None
    variants = [variant for variant in VARIANTS if needed in variant.needs]
    names = ",".join(variant.name for variant in variants)
    parser = argparse.ArgumentParser(
        prog="python -m piecework.kernels.cpu.native.ship",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--variants", metavar="LIST", default=names, help="default: %(default)s")
    chosen = parser.parse_args(argv).variants.split(",")
    if not variants:
        parser.error("kernels are shipped for Linux on x86_64 and aarch64")
    if unknown := set(chosen) - {variant.name for variant in variants}:
        parser.error(f"--variants: {unknown.pop()!r} is none of {names}")
    try:
        compiler = find_compiler()
    except OSError as error:
        parser.error(f"{error}; install g++ or name it in $CXX")
    if is_clang(compiler):
        parser.error(f"{compiler} is clang, whose OpenMP is not torch's; name g++ in $CXX")
    made = [_made(compiler, variant) for variant in variants if variant.name in chosen]
    return 0 if all(made) else 1


def _made(compiler: str, variant: Variant) -> bool:
    library = shipped_library(variant)
    try:
        library.parent.mkdir(exist_ok=True)
        for other in library.parent.glob(f"{variant.name}-*"):
            if other.is_dir():  # of one that was killed
                shutil.rmtree(other)
            elif other != library:
                other.unlink()
        if not library.exists():
            compile_variant(compiler, variant, _OPENMP, library)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"{variant.name} is not shipped: {error}", file=sys.stderr)
        return False
    return True


if __name__ == "__main__":
    raise SystemExit(main())
