"""AMX's products: by the instructions as Intel's manual describes them, in plain C++, and not at
all where the kernel or the CPU refuses them. `test_kernels_under_bochs.py` runs the instructions.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from piecework.kernels.cpu import matrix_units
from piecework.kernels.cpu.native import build, compiler
from piecework.kernels.cpu.native import linear as native
from piecework.kernels.cpu.native.instruction_sets import instruction_sets
from piecework.kernels.cpu.native.linear import NativeLinear

_SOURCES = Path(build.__file__).parent
_AMX = build.VARIANTS[0]
_BY = {variant.name: variant for variant in build.VARIANTS}["avx512_bf16"]
MODEL = build.Variant("amx_model", _BY.needs, (*_BY.flags, "-DPIECEWORK_TILE_MODEL"))


def library_of_tiles(folder: Path, *flags: str, sources: Path = _SOURCES) -> ctypes.CDLL:
    made = folder / "tiles.so"
    command = ["g++", *compiler.FLAGS, *flags, "-shared", str(sources / "tiles.cpp")]
    subprocess.run([*command, "-o", str(made)], check=True, timeout=120)
    return ctypes.CDLL(str(made))


def test_tiles_that_compute_what_they_should_are_used(tmp_path: Path) -> None:
    assert library_of_tiles(tmp_path, "-DPIECEWORK_TILE_MODEL").piecework_has_tiles() == 1


def test_tiles_that_err_are_not_used(tmp_path: Path) -> None:
    for name in ("tiles.cpp", "tiles.h", "common.h"):
        text = (_SOURCES / name).read_text()
        (tmp_path / name).write_text(text.replace("sums[m][n][0] + sums[m][n][1]", "0.0f"))
    library = library_of_tiles(tmp_path, "-DPIECEWORK_TILE_MODEL", sources=tmp_path)
    assert library.piecework_has_tiles() == 0


@pytest.mark.skipif("amx_tile" in instruction_sets(), reason="this CPU has AMX")
def test_where_the_kernel_refuses_tiles_nothing_runs_them(tmp_path: Path) -> None:
    try:
        library = library_of_tiles(tmp_path, *_AMX.flags)
    except subprocess.CalledProcessError:
        pytest.skip("this compiler does not know AMX")
    assert library.piecework_has_tiles() == 0


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    if not MODEL.needs <= instruction_sets():
        pytest.skip("this CPU lacks AVX-512 with bfloat16")
    made = build.load_variant(MODEL)
    assert made.piecework_has_tiles() == 1 and made.piecework_choose_way(1) == 1
    return made


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [24, 33, 50])
@pytest.mark.parametrize(
    ("kind", "columns"), [("bfloat16", 1131), ("bfloat16", 23), ("Q8_0", 1088), ("Q4_1", 96)]
)
def test_products_by_tiles_are_those_of_bfloat16(
    library: ctypes.CDLL, kind: str, columns: int, tokens: int
) -> None:
    numbers = np.random.default_rng(0).normal(0, 0.1, (70, columns)).astype(np.float32)
    if kind == "bfloat16":
        stored = torch.from_numpy(numbers).bfloat16()
        weight = stored.double()
    else:
        blocks = quantize(numbers, GGMLQuantizationType[kind])
        stored = torch.from_numpy(blocks)
        exact = dequantize(blocks, GGMLQuantizationType[kind])
        weight = torch.from_numpy(exact).bfloat16().double()
    kernels = NativeLinear(library)
    layout = kernels.layout(kind, columns)
    assert layout is not None
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(0)).bfloat16()
    bias = torch.randn(70, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = native.multiply(library, x, None, kernels.pack(kind, [stored]), bias, 70, layout)
    expected = x.double() @ weight.T + bias.double()
    allowed = expected.abs() * 2.0**-8 + (x.double().abs() @ weight.abs().T) * 1e-5
    assert bool(((found.double() - expected).abs() <= allowed).all())


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [8, 33, 50])
@pytest.mark.parametrize(("columns", "groups"), [(1131, 1), (60, 1), (1152, 9)])
def test_products_of_bytes_by_tiles_are_exact(
    library: ctypes.CDLL, columns: int, groups: int, tokens: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    stored = torch.randint(-127, 128, (70, columns), generator=generator, dtype=torch.int8)
    x = torch.randint(-127, 128, (tokens, columns), generator=generator, dtype=torch.int8)
    scales = torch.rand(70, 1, generator=generator) * 0.01
    x_scales = torch.rand(tokens, groups, generator=generator) * 0.01
    kernels = NativeLinear(library)
    layout = kernels.layout("int8", columns)
    assert layout is not None
    packed = kernels.pack("int8", [stored], [scales])
    found = native.multiply(library, x, x_scales, packed, None, 70, layout)
    each = columns // groups
    expected = (
        sum(
            (x[:, first : first + each].double() @ stored[:, first : first + each].double().T)
            * x_scales[:, first // each, None].double()
            for first in range(0, columns, each)
        )
        * scales.double().T
    )
    torch.testing.assert_close(found.double(), expected, rtol=2.0**-7, atol=1e-5)


class Library:
    """Kernels with tiles or without."""

    def __init__(self, has_tiles: bool) -> None:
        self.piecework_has_tiles = lambda: has_tiles
        self.piecework_gguf_format = lambda place, info: False


@pytest.mark.parametrize(
    ("able", "has_tiles", "seconds", "packs"),
    [
        ({"avx2"}, False, (9.0, 1.0), True),
        ({"avx2", "amx_bf16"}, False, (1.0, 9.0), False),
        ({"avx2", "amx_bf16"}, True, (1.0, 1.0), True),
        ({"avx2", "amx_bf16"}, True, (2.0, 1.0), False),
    ],
)
def test_weights_of_16_bits_are_in_panels_where_those_are_as_fast_as_onednn(
    able: set[str],
    has_tiles: bool,
    seconds: tuple[float, float],
    packs: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter(seconds)
    monkeypatch.setattr(matrix_units, "instruction_sets", lambda: frozenset(able))
    monkeypatch.setattr(matrix_units.packed_linear, "is_available", lambda: True)
    monkeypatch.setattr(matrix_units.packed_linear, "pack", lambda weight: weight)
    monkeypatch.setattr(NativeLinear, "pack", lambda self, kind, parts: parts[0])
    monkeypatch.setattr(matrix_units, "_least", lambda work: next(times))
    assert matrix_units.panels_pay(Library(has_tiles)) == packs  # type: ignore[arg-type]
