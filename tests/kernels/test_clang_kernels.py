"""clang compiles the kernels as g++ does: every variant of this architecture, of which those that
run here give what g++'s portable one gives, and so does one for Arm under emulation.

Needs clang++ and its OpenMP (libomp-dev on Debian); for Arm also Debian's g++-aarch64-linux-gnu,
whose headers and libraries clang takes, and qemu-user.
"""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

import emulation
import pytest
from native_variants import native_variants

from piecework.kernels.cpu.native import build, openmp

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

_IS_ARM = platform.machine().lower() in ("aarch64", "arm64")
_OWN = [each for each in build.VARIANTS if not each.needs or ("asimd" in each.needs) == _IS_ARM]


@pytest.fixture(scope="module")
def clang() -> str:
    found = shutil.which("clang++")
    if found is None or not openmp._works(found, openmp.OpenMP(("-fopenmp",))):
        pytest.skip("this machine lacks clang++ with OpenMP")
    return found


@pytest.mark.parametrize("variant", native_variants(), ids=lambda variant: variant.name)
def test_its_kernels_give_what_those_of_the_other_give(
    variant: build.Variant, clang: str, tmp_path: Path
) -> None:
    program = emulation.compile_program(clang, variant, tmp_path / variant.name, static=False)
    emulation.assert_alike(emulation.outputs(program), emulation.portable_outputs())


@pytest.mark.parametrize("variant", _OWN, ids=lambda variant: variant.name)
def test_each_variant_is_compiled_and_linked(
    variant: build.Variant, clang: str, tmp_path: Path
) -> None:
    """Without optimisation, which takes a fifth of the time and refuses no less."""
    emulation.compile_program(clang, variant, tmp_path / variant.name, level="-O0", static=False)


def test_the_best_variant_for_arm_gives_the_same_under_emulation(tmp_path: Path) -> None:
    """With one thread: Debian's clang has OpenMP for this architecture alone."""
    emulation.skip_without("clang++", emulation.ARM_COMPILER, emulation.ARM_EMULATOR)
    (variant,) = (each for each in build.VARIANTS if each.name == "neon_bf16")
    program = emulation.compile_program(
        "clang++", variant, tmp_path / variant.name, others=["--target=aarch64-linux-gnu"]
    )
    found = emulation.outputs(program, emulation.ARM_EMULATOR, "-cpu", "max")
    emulation.assert_alike(found, emulation.portable_outputs())
    emulation.assert_rows_are_their_own(found)
    assert emulation.ways_in(found) == {"0", "1", "2", "4"}
