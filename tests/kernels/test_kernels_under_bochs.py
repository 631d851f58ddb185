"""The kernels of x86's variants give, on a CPU that Bochs computes, what the portable ones give
here: AVX-512 with its dot products and float16, and AMX. It tells nothing of their speed.
"""

from __future__ import annotations

import bochs
import emulation
import pytest
from emulation import Lines

from piecework.kernels.cpu.native import build

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

_X86 = [variant for variant in build.VARIANTS if variant.needs and "asimd" not in variant.needs]
_SECONDS = 5400


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Lines]:
    if missing := bochs.missing():
        pytest.skip(f"this machine lacks {', '.join(missing)}")
    folder = tmp_path_factory.mktemp("bochs")
    variants = [each for each in _X86 if bochs.has_tiles() or "amx_tile" not in each.needs]
    made = [emulation.compile_program("g++", each, folder / each.name) for each in variants]
    portable = emulation.compile_program("g++", emulation.PORTABLE, folder / "portable")
    texts = bochs.run(made, folder, _SECONDS)
    lines = {name: emulation.lines_of(text) for name, text in texts.items()}
    return {**lines, "portable": emulation.outputs(portable)}


@pytest.mark.parametrize("variant", _X86, ids=lambda variant: variant.name)
def test_a_variant_gives_what_the_portable_one_gives(
    variant: build.Variant, told: dict[str, Lines]
) -> None:
    if variant.name not in told:
        pytest.skip(f"{bochs.PROGRAM} is a Bochs without bochs.patch, which Linux lends no tiles")
    found = told[variant.name]
    emulation.assert_alike(found, told["portable"])
    emulation.assert_rows_are_their_own(found)
    has_dots, has_halves = "avx512_bf16" in variant.needs, "avx512_fp16" in variant.needs
    ways = {"0", "4"} | ({"1"} if has_dots else set()) | ({"2"} if has_halves else set())
    assert emulation.ways_in(found) == ways
    assert found["tiles"].tolist() == [float("amx_tile" in variant.needs)]
    assert found["unpacks"].tolist() == [float("avx512_vnni" in variant.needs)]
