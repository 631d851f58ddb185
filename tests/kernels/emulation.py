"""Programs that print what the kernels make of fixed inputs, compiled for CPUs that this machine is
not, and what is held of their output.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from piecework.kernels.cpu.native import build, parts
from piecework.kernels.cpu.native import compiler as compiling

SOURCES = Path(build.__file__).parent
PORTABLE = build.VARIANTS[-1]
ARM_COMPILER, ARM_EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
_OWN = Path(__file__).parent
_ROUNDED = 2.0**-7
"""Of a line's largest number: weights of 4 and 8 bits rounded to bfloat16, or sums in float16."""
_EXACT = 2.0**-10
"""The same of what differs by the order of sums, and then by a last digit of bfloat16."""
_DIGIT, _SELDOM = 2.0**-7, 1e-3
"""The last digit of a bfloat16, of the number itself, and how many of a line's may differ by it."""
_STEP = 2.0**-5
"""The same of logits behind two layers, each of which rounds to bfloat16 many times."""

Lines = dict[str, np.ndarray]


def skip_without(*programs: str) -> None:
    if missing := [name for name in programs if shutil.which(name) is None]:
        pytest.skip(f"this machine lacks {' and '.join(missing)}")


def compile_program(
    compiler: str,
    variant: build.Variant,
    folder: Path,
    *,
    level: str = "-O2",
    static: bool = True,
    others: Sequence[str] = ("-fopenmp",),
) -> Path:
    """`kernel_outputs.cpp` with the kernels as a variant. `static`: linked to nothing that is not
    in it. `others`: flags beside the variant's.
    """
    folder.mkdir()
    flags = [*compiling.FLAGS, level, *variant.flags, *others]
    formats = folder / "formats.cpp"
    formats.write_text(_with_formats())
    own = [formats, _OWN / "kernel_outputs.cpp", _OWN / "kernel_steps.cpp"]
    sources = [each for part in parts.all_parts() for each in parts.sources_of(part)]
    sources = [*dict.fromkeys(sources), *map(parts.Source, own)]
    made = [folder / f"{source.name}.o" for source in sources]

    def compile_one(source: parts.Source, to: Path) -> None:
        given = [f"-I{SOURCES}", *source.flags]
        command = [compiler, *flags, *given, "-c", str(source.path), "-o", str(to)]
        subprocess.run(command, check=True, timeout=1800)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compile_one, sources, made))
    program = folder / variant.name
    link = [compiler, *flags, *(["-static"] * static), *map(str, made), "-o", str(program)]
    subprocess.run(link, check=True, timeout=120)
    return program


def _with_formats() -> str:
    """C++ that adds all block formats and kinds of caches before `main` begins."""
    formats = [f"piecework_format_{name}" for name in parts.formats()]
    caches = [f"piecework_cache_{name}" for name in parts.CACHES]
    declared = "".join(f'extern "C" const void* {name}();\n' for name in formats)
    declared += "".join(f'extern "C" void {name}(void*);\n' for name in caches)
    added = "".join(f"  piecework_add_format({name}()),\n" for name in formats)
    added += "".join(f"  {name}(piecework_caches()),\n" for name in caches)
    return (
        'extern "C" void piecework_add_format(const void*);\n'
        f'extern "C" void* piecework_caches();\n{declared}'
        f"static const bool is_complete = (\n{added}  true);\n"
    )


def outputs(program: Path, *emulator: str) -> Lines:
    run = [*emulator, str(program)]
    return lines_of(
        subprocess.run(run, capture_output=True, text=True, check=True, timeout=600).stdout
    )


@cache
def portable_outputs() -> Lines:
    """What g++'s portable kernels give here, which others are compared with."""
    skip_without("g++")
    with tempfile.TemporaryDirectory(prefix="piecework-kernels-") as folder:
        return outputs(compile_program("g++", PORTABLE, Path(folder) / "portable"))


def lines_of(text: str) -> Lines:
    lines = (line.partition(":") for line in text.splitlines())
    return {name: np.array(numbers.split(), np.float64) for name, _, numbers in lines}


def assert_alike(found: Lines, portable: Lines) -> None:
    """But for what it has, and in a step for a rounding here and there."""
    assert found.keys() >= portable.keys()
    for name, numbers in found.items():
        if name in ("tiles", "unpacks"):
            continue
        # Ways to multiply that only this variant has are compared with that of float32.
        is_shared = name in portable
        if name.startswith("draws") and not is_shared:
            continue  # other roundings may choose other tokens
        expected = portable[name if is_shared else f"{name.rpartition(' ')[0]} 0"]
        if "of a step" in name and not is_shared:
            # Other roundings may choose other experts for a token here and there.
            assert np.median(np.abs(numbers - expected)) <= _STEP * np.abs(expected).max(), name
            continue
        share = _STEP if "of a step" in name else _EXACT if is_shared else _ROUNDED
        allowed, off = share * np.abs(expected).max(), np.abs(numbers - expected)
        # Sums beside the middle of two bfloat16 may become either one, seldom.
        assert np.mean(off > allowed) <= _SELDOM, name
        assert (off <= allowed + _DIGIT * np.abs(expected)).all(), name


def assert_rows_are_their_own(found: Lines) -> None:
    """Products by whole numbers are the same bits for a row whatever rows are beside it."""
    linears = {
        name: each
        for name, each in found.items()
        if name.startswith("linear") and name.endswith("by way 4")
    }
    most = {name.partition(" for ")[0]: each for name, each in linears.items() if "71 tok" in name}
    assert len(most) > 10
    for name, numbers in linears.items():
        whole = most[name.partition(" for ")[0]]
        np.testing.assert_array_equal(numbers, whole[: len(numbers)], err_msg=name)


def ways_in(lines: Lines) -> set[str]:
    return {name.rpartition(" ")[2] for name in lines if "way" in name}
