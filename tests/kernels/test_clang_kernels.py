"""clang compiles the kernels as g++ does: every variant of this architecture, of which those that
run here give what g++'s portable one gives.

Needs clang++ and its OpenMP (libomp-dev on Debian).
"""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

import emulation
import pytest
from emulation import Lines
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


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    folder = tmp_path_factory.mktemp("kernels") / "portable"
    return emulation.outputs(emulation.compile_program("g++", emulation.PORTABLE, folder))


@pytest.mark.parametrize("variant", native_variants(), ids=lambda variant: variant.name)
def test_its_kernels_give_what_those_of_the_other_give(
    variant: build.Variant, clang: str, portable: Lines, tmp_path: Path
) -> None:
    program = emulation.compile_program(clang, variant, tmp_path / variant.name, static=False)
    emulation.assert_alike(emulation.outputs(program), portable)


@pytest.mark.parametrize("variant", _OWN, ids=lambda variant: variant.name)
def test_each_variant_is_compiled_and_linked(
    variant: build.Variant, clang: str, tmp_path: Path
) -> None:
    """Without optimisation, which takes a fifth of the time and refuses no less."""
    emulation.compile_program(clang, variant, tmp_path / variant.name, level="-O0", static=False)
