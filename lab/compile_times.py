"""Seconds of the processor that the compiler takes for each file of the kernels:

    python -m piecework.lab.compile_times --parts core,Q4_1,Q8_0

One file after another, for this machine's CPU; the files of SmolLM2 in Q4_1 by default. `--all`
compiles them as a start does, on all cores into an empty folder, and tells the time by the clock.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
from pathlib import Path

from ..kernels.cpu.native import build, compiler, parts
from ..kernels.cpu.native.openmp import find_openmp
from ..kernels.cpu.native.variants import runnable_variants


def _children() -> float:
    spent = os.times()
    return spent.children_user + spent.children_system


def _seconds(command: list[str]) -> float:
    before = _children()
    subprocess.run(command, check=True)
    return _children() - before


def _each(names: list[str]) -> None:
    variant, command = runnable_variants()[0], compiler.find_compiler()
    flags = [*compiler.FLAGS, *variant.flags, *find_openmp(command).compile]
    sources = {source: None for part in names for source in parts.sources_of(part)}
    with tempfile.TemporaryDirectory() as folder:
        header, made = f"{folder}/kernels.h", f"{folder}/made.o"
        Path(header).write_text(f'#include "{parts.SOURCES / "weights.h"}"\n')
        first = [command, *flags, "-x", "c++-header", header, "-o", f"{header}.gch"]
        rows = [(_seconds(first), "the header")]
        for source in sources:
            file = [*source.flags, "-c", str(source.path), "-o", made]
            rows.append((_seconds([command, *flags, "-include", header, *file]), source.name))
    print(f"| {variant.name} | seconds |\n|---|---|")
    for seconds, name in sorted(rows, reverse=True):
        print(f"| {name} | {seconds:.1f} |")
    print(f"| sum | {sum(seconds for seconds, _ in rows):.1f} |")


def _all(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PIECEWORK_KERNELS_DIR"] = folder
        began = time.monotonic()
        build.prepare_kernels(lambda: names)
        clock = time.monotonic() - began
    print(f"all: {clock:.1f} s by the clock, {_children():.1f} s of the processor")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m piecework.lab.compile_times",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parts", default="core,Q4_1,Q8_0")
    parser.add_argument("--all", action="store_true")
    given = parser.parse_args()
    (_all if given.all else _each)(given.parts.split(","))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
