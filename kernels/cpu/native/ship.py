"""Compile the kernels for every CPU of this architecture and put them into the package: `python -m
piecework.kernels.cpu.native.ship`.

An installation from such a package (a wheel, an image) needs no compiler and no build. A file is
used only with the sources that it was compiled from; changed sources are built as usual.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence

from ...toolchain import is_clang
from .build import shipped_library
from .compiler import MAKING, compile_libraries, find_compiler
from .openmp import OpenMP
from .parts import all_parts, sources_of
from .variants import VARIANTS, Variant

# Do not link OpenMP: the path of torch's library is known only where the package is installed.
_OPENMP = OpenMP(("-fopenmp",))
# Instruction set that all variants of an architecture need (Linux's names).
_ARCHITECTURES = {"x86_64": "avx2", "aarch64": "asimd"}


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
        parser.error(f"--variants: {unknown.pop()!r} is not one of {names}")
    try:
        compiler = find_compiler()
    except OSError as error:
        parser.error(f"{error}; install g++ or set $CXX to its path")
    if is_clang(compiler):
        parser.error(f"{compiler} is clang, which has another OpenMP than torch; set $CXX to g++")
    made = [_made(compiler, variant) for variant in variants if variant.name in chosen]
    return 0 if all(made) else 1


def _made(compiler: str, variant: Variant) -> bool:
    libraries = {shipped_library(variant, part): sources_of(part) for part in all_parts()}
    folder = next(iter(libraries)).parent
    try:
        folder.mkdir(exist_ok=True)
        for killed in folder.glob(f"{variant.name}{MAKING}*"):
            shutil.rmtree(killed)
        for other in folder.glob(f"{variant.name}-*.so"):
            if other not in libraries:
                other.unlink()
        missing = {path: sources for path, sources in libraries.items() if not path.exists()}
        if missing:
            compile_libraries(compiler, variant, _OPENMP, missing, variant.name)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"{variant.name} is not shipped: {error}", file=sys.stderr)
        return False
    return True


if __name__ == "__main__":
    raise SystemExit(main())
