"""The kernels of Arm's variants give, under emulation, what the portable ones give here.

qemu tells nothing of their speed. Needs Debian's g++-aarch64-linux-gnu and qemu-user.
"""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from piecework.kernels.cpu.native import build

pytestmark = pytest.mark.slow

_CROSS, _EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
_SOURCES = Path(build.__file__).parent
_PORTABLE = build.VARIANTS[-1]
_ARM = [variant for variant in build.VARIANTS if "asimd" in variant.needs]
_ROUNDED = 2.0**-7
"""Of a line's largest number: weights of 4 and 8 bits rounded to bfloat16, or sums in float16."""
_EXACT = 2.0**-10
"""The same of what differs by the order of sums, and then by a last digit of bfloat16."""

Lines = dict[str, np.ndarray]


def outputs(compiler: str, variant: build.Variant, folder: Path, *emulator: str) -> Lines:
    """What `kernel_outputs.cpp` prints when it is compiled with the kernels as a variant."""
    folder.mkdir()
    flags = [*build._FLAGS, "-O2", *variant.flags, "-fopenmp"]
    sources = [*_SOURCES.glob("*.cpp"), Path(__file__).parent / "kernel_outputs.cpp"]
    made = [folder / f"{source.stem}.o" for source in sources]

    def compile_one(source: Path, to: Path) -> None:
        command = [compiler, *flags, f"-I{_SOURCES}", "-c", str(source), "-o", str(to)]
        subprocess.run(command, check=True, timeout=300)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compile_one, sources, made))
    program = folder / "program"
    link = [compiler, *flags, "-static", *map(str, made), "-o", str(program)]
    subprocess.run(link, check=True, timeout=120)
    run = [*emulator, str(program)]
    text = subprocess.run(run, capture_output=True, text=True, check=True, timeout=300).stdout
    lines = (line.partition(":") for line in text.splitlines())
    return {name: np.array(numbers.split(), np.float64) for name, _, numbers in lines}


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    return outputs("g++", _PORTABLE, tmp_path_factory.mktemp("kernels") / "portable")


@pytest.mark.parametrize("variant", _ARM, ids=lambda variant: variant.name)
def test_an_arm_variant_gives_what_the_portable_one_gives(
    variant: build.Variant, portable: Lines, tmp_path: Path
) -> None:
    if missing := [name for name in (_CROSS, _EMULATOR) if shutil.which(name) is None]:
        pytest.skip(f"this machine lacks {' and '.join(missing)}")
    found = outputs(_CROSS, variant, tmp_path / variant.name, _EMULATOR, "-cpu", "max")
    assert found.keys() >= portable.keys()
    for name, numbers in found.items():
        # Ways to multiply that only this variant has are compared with that of float32.
        is_shared = name in portable
        expected = portable[name if is_shared else f"{name.rpartition(' ')[0]} 0"]
        allowed = (_EXACT if is_shared else _ROUNDED) * np.abs(expected).max()
        np.testing.assert_allclose(numbers, expected, rtol=0, atol=allowed, err_msg=name)
    ways = {name.rpartition(" ")[2] for name in found if "way" in name}
    has_dots, has_halves = "bf16" in variant.needs, "asimdhp" in variant.needs
    assert ways == {"0", "4"} | ({"1"} if has_dots else set()) | ({"2"} if has_halves else set())


@pytest.mark.parametrize(
    ("name", "file", "instructions"),
    [
        ("neon_bf16", "dots", ["bfdot"]),
        ("neon_bf16", "bytes", ["usdot"]),
        ("neon_dotprod", "bytes", ["sdot"]),
        ("neon_dotprod", "halves", ["fmla.*8h"]),
    ],
)
def test_it_has_the_instructions_that_it_is_made_for(
    name: str, file: str, instructions: list[str], tmp_path: Path
) -> None:
    if shutil.which(_CROSS) is None:
        pytest.skip(f"this machine lacks {_CROSS}")
    (variant,) = (each for each in _ARM if each.name == name)
    made = tmp_path / "made.s"
    command = [_CROSS, *build._FLAGS, *variant.flags, "-S", str(_SOURCES / f"{file}.cpp")]
    subprocess.run([*command, "-o", str(made)], check=True, timeout=300)
    for instruction in instructions:
        assert subprocess.run(["grep", "-q", instruction, str(made)]).returncode == 0
