"""The kernels of Arm's variants give, under emulation, what the portable ones give here.

qemu tells nothing of their speed. Needs Debian's g++-aarch64-linux-gnu and qemu-user.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import emulation
import pytest

from piecework.kernels.cpu.native import build, compiler

# Compilers that make programs for Arm take minutes of a busy machine.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

_ARM = [variant for variant in build.VARIANTS if "asimd" in variant.needs]


@pytest.mark.parametrize("variant", _ARM, ids=lambda variant: variant.name)
def test_an_arm_variant_gives_what_the_portable_one_gives(
    variant: build.Variant, tmp_path: Path
) -> None:
    emulation.skip_without(emulation.ARM_COMPILER, emulation.ARM_EMULATOR)
    program = emulation.compile_program(emulation.ARM_COMPILER, variant, tmp_path / variant.name)
    found = emulation.outputs(program, emulation.ARM_EMULATOR, "-cpu", "max")
    emulation.assert_alike(found, emulation.portable_outputs())
    emulation.assert_rows_are_their_own(found)
    has_dots, has_halves = "bf16" in variant.needs, "asimdhp" in variant.needs
    ways = {"0", "4"} | ({"1"} if has_dots else set()) | ({"2"} if has_halves else set())
    assert emulation.ways_in(found) == ways


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
    emulation.skip_without(emulation.ARM_COMPILER)
    (variant,) = (each for each in _ARM if each.name == name)
    made = tmp_path / "made.s"
    command = [emulation.ARM_COMPILER, *compiler.FLAGS, *variant.flags, "-S", "-o", str(made)]
    subprocess.run([*command, str(emulation.SOURCES / f"{file}.cpp")], check=True, timeout=300)
    for instruction in instructions:
        assert subprocess.run(["grep", "-q", instruction, str(made)]).returncode == 0
