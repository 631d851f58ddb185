"""Products with packed weights are those with the numbers that the weights stand for, on every variant of the kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from piecework.kernels.cpu.native import build
from piecework.kernels.cpu.native import linear as native
from piecework.kernels.cpu.native.linear import NativeLinear

KINDS = ["bfloat16", "Q8_0", "Q4_0", "Q4_1"]
VARIANTS = build.runnable_variants()
THREADS = torch.get_num_threads()


def weight(kind: str, rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight as it is stored, and its numbers in float64."""
    numbers = np.random.default_rng(seed).normal(0, 0.1, (rows, columns)).astype(np.float32)
    if kind == "bfloat16":
        stored = torch.from_numpy(numbers).bfloat16()
        return stored, stored.double()
    blocks = quantize(numbers, GGMLQuantizationType[kind])
    return torch.from_numpy(blocks), torch.from_numpy(dequantize(blocks, GGMLQuantizationType[kind])).double()


def multiply(
    library: ctypes.CDLL, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, rows: int, layout: int
) -> torch.Tensor:
    out = torch.full((x.shape[0], rows), torch.nan, dtype=torch.bfloat16)
    struct = native.linear_struct(packed, bias, x.shape[1], rows, layout)
    pointers = ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(x.stride(0)), ctypes.c_void_p(out.data_ptr())
    library.piecework_linear(ctypes.byref(struct), *pointers, x.shape[0], THREADS)
    return out


def close(found: torch.Tensor, exact: torch.Tensor, x: torch.Tensor, numbers: torch.Tensor) -> bool:
    """Within bfloat16's rounding of the result, and what float32 sums may lose."""
    allowed = exact.abs() * 2.0**-8 + (x.double().abs() @ numbers.abs().T) * 1e-5
    return bool(((found.double() - exact).abs() <= allowed).all())


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
@settings(max_examples=25)
@given(
    kind=st.sampled_from(KINDS),
    tokens=st.integers(0, 90),
    rows=st.integers(1, 200),
    groups=st.integers(1, 70),
    has_bias=st.booleans(),
    seed=st.integers(0, 9),
)
def test_it_is_the_product(variant: build.Variant, kind: str, tokens: int, rows: int, groups: int, has_bias: bool, seed: int) -> None:
    kernels = NativeLinear(build.load_variant(variant))
    # Any width for numbers, one of whole blocks for the others; some are wider than what is summed at once.
    columns = 17 * groups + 1 if kind == "bfloat16" else 32 * groups
    stored, numbers = weight(kind, rows, columns, seed)
    layout = kernels.layout(kind, columns)
    assert layout is not None
    packed = kernels.pack(kind, [stored])
    assert packed.shape == kernels.packed_shape(layout, columns, rows)
    generator = torch.Generator().manual_seed(seed)
    # Rows of x may lie apart, as those of a slice do.
    x = torch.randn(tokens, columns + 3, generator=generator).bfloat16()[:, :columns]
    bias = torch.randn(rows, generator=generator).bfloat16() if has_bias else None
    exact = x.double() @ numbers.T + (0 if bias is None else bias.double())
    found = multiply(kernels._library, x, packed, bias, rows, layout)
    assert close(found, exact, x, numbers)


@pytest.fixture
def dots() -> Iterator[NativeLinear]:
    """Kernels that make products of many rows by dot products of bfloat16, be they faster here or not."""
    library = build.load_variant(VARIANTS[0])
    library.piecework_choose_dots(1)
    if not library.piecework_dots_are_faster():
        pytest.skip("this CPU has no dot products of bfloat16")
    yield NativeLinear(library)
    library.piecework_choose_dots(-1)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from(KINDS), tokens=st.integers(24, 90), rows=st.integers(1, 200), groups=st.integers(1, 70), seed=st.integers(0, 9))
def test_dot_products_are_those_with_weights_in_bfloat16(
    dots: NativeLinear, kind: str, tokens: int, rows: int, groups: int, seed: int
) -> None:
    columns = 17 * groups + 1 if kind == "bfloat16" else 32 * groups
    stored, numbers = weight(kind, rows, columns, seed)
    numbers = numbers.float().bfloat16().double()
    layout = dots.layout(kind, columns)
    assert layout is not None
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, columns + 3, generator=generator).bfloat16()[:, :columns]
    bias = torch.randn(rows, generator=generator).bfloat16()
    found = multiply(dots._library, x, dots.pack(kind, [stored]), bias, rows, layout)
    assert close(found, x.double() @ numbers.T + bias.double(), x, numbers)


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_products_of_few_rows_use_no_dot_products(dots: NativeLinear, kind: str) -> None:
    """They would round the weights, which pays only for many rows."""
    stored, numbers = weight(kind, 64, 256, 0)
    packed, layout = dots.pack(kind, [stored]), dots.layout(kind, 256)
    assert layout is not None
    x = torch.randn(24, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    few = torch.cat([multiply(dots._library, rows, packed, None, 64, layout) for rows in x.split(12)])
    assert close(few, x.double() @ numbers.T, x, numbers)
    assert not torch.equal(few, multiply(dots._library, x, packed, None, 64, layout))


@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_rows_one_after_another(kind: str) -> None:
    kernels = native.native_linear()
    assert kernels is not None
    parts, numbers = zip(*(weight(kind, rows, 64, rows) for rows in (5, 40, 96)), strict=True)
    packed = kernels.pack(kind, parts)
    x = torch.randn(7, 64).bfloat16()
    layout = kernels.layout(kind, 64)
    found = kernels.op(x, packed, None, 141, layout)
    assert close(found, x.double() @ torch.cat(numbers).T, x, torch.cat(numbers))


def test_blocks_that_do_not_fill_a_row_are_not_known() -> None:
    kernels = native.native_linear()
    assert kernels is not None
    assert kernels.layout("Q4_1", 48) is None and kernels.layout("Q6_K", 64) is None
    assert kernels.layout("bfloat16", 47) is not None


def test_extreme_scales_of_q4_0_keep_their_values() -> None:
    """Its minimum is minus eight scales, worked out in float16."""
    kernels = native.native_linear()
    assert kernels is not None
    scales = np.array([0.0, 2.0**-14, -0.37, 1000.0, 2.0**-24, 3 * 2.0**-24, -1023 * 2.0**-24, 127 * 2.0**-24], dtype=np.float16)
    blocks = np.zeros((len(scales), 18), dtype=np.uint8)
    blocks[:, :2] = scales[:, None].view(np.uint8)
    blocks[:, 2:] = np.arange(16, dtype=np.uint8) * 17
    numbers = torch.from_numpy(dequantize(blocks, GGMLQuantizationType.Q4_0)).double()
    packed = kernels.pack("Q4_0", [torch.from_numpy(blocks)])
    x = torch.eye(32).bfloat16()
    assert torch.equal(kernels.op(x, packed, None, len(scales), kernels.layout("Q4_0", 32)), numbers.T.bfloat16())


def test_many_rows_of_a_wide_weight_are_cut_into_chunks() -> None:
    kernels = native.native_linear()
    assert kernels is not None
    stored, numbers = weight("Q4_1", 64, 2080, 0)
    x = torch.randn(900, 2080).bfloat16()
    found = kernels.op(x, kernels.pack("Q4_1", [stored]), None, 64, kernels.layout("Q4_1", 2080))
    assert close(found, x.double() @ numbers.T, x, numbers)
