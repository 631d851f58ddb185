"""Products by whole numbers: x rounded to 8 bits in groups, as a plain model in numpy rounds it, on
every variant of the kernels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from gguf_blocks import FORMATS, random_blocks
from hypothesis import given, settings
from hypothesis import strategies as st
from native_variants import built, kinds_of, native_variants, variants_with

from piecework.kernels.cpu.native import build
from piecework.kernels.cpu.native.gguf_formats import gguf_formats
from piecework.kernels.cpu.native.linear import NativeLinear, multiply
from piecework.kernels.cpu.native.linear_struct import INTEGERS

K_QUANTS = ["Q3_K", "Q4_K", "Q5_K", "Q6_K"]
KINDS = ["Q8_0", "Q4_0", "Q4_1", *K_QUANTS]
OTHERS = [name for name in FORMATS if name not in KINDS]
WIDE = ["Q8_0", "IQ4_NL", "IQ4_XS"]
"""Whose numbers have 8 bits, of which AVX2 sums up pairs in 16."""
VARIANTS = native_variants()
each_variant = pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)


def rounded(x: torch.Tensor, variant: build.Variant, kind: str) -> torch.Tensor:
    """x [T, K] as 8 bits in groups of 32 hold it, in float64."""
    groups = x.float().numpy().reshape(len(x), -1, 32)
    largest = np.abs(groups).max(-1, keepdims=True)
    if variant.name == "avx2" and kind in WIDE:
        # Columns 0 and 2, 1 and 3, 4 and 6, 5 and 7 of each eight are multiplied as pairs.
        fours = groups.reshape(len(x), -1, 8, 4)
        sums = np.abs(fours[..., :2] + fours[..., 2:]).reshape(len(x), -1, 16)
        largest = np.maximum(largest, sums.max(-1, keepdims=True))
    is_zero = largest < np.float32(2.0**-100)
    inverse = np.where(is_zero, np.float32(0), np.float32(127) / np.where(is_zero, 1, largest))
    scale = np.where(is_zero, np.float32(0), largest * (np.float32(1) / np.float32(127)))
    numbers = np.rint(groups * inverse.astype(np.float32)).astype(np.float64)
    return torch.from_numpy((numbers * scale.astype(np.float64)).reshape(x.shape))


def stored(kind: str, rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of a file, and the numbers that they stand for."""
    if kind in K_QUANTS + OTHERS:
        random, values = random_blocks(kind, rows, columns, seed)
        return torch.from_numpy(random), torch.from_numpy(values).double()
    numbers = np.random.default_rng(seed).normal(0, 0.1, (rows, columns)).astype(np.float32)
    blocks = quantize(numbers, GGMLQuantizationType[kind])
    return torch.from_numpy(blocks), torch.from_numpy(
        dequantize(blocks, GGMLQuantizationType[kind])
    ).double()


def product(
    library: ctypes.CDLL,
    kind: str,
    blocks: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    kernels = NativeLinear(library, activations="int8")
    layout = kernels.layout(kind, x.shape[1])
    assert layout is not None and layout & INTEGERS
    return multiply(library, x, None, kernels.pack(kind, [blocks]), bias, len(blocks), layout)


@contextmanager
def unpacking(library: ctypes.CDLL, value: int) -> Iterator[bool]:
    """Panels are unpacked for many rows (1) or never (0). Whether the kernels can do either. By one
    thread, which many rows are not shared out of.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield bool(library.piecework_unpack_panels(value))
    finally:
        library.piecework_unpack_panels(-1)
        torch.set_num_threads(threads)


def width(kind: str, groups: int) -> int:
    """Of whole blocks; some are wider than what is summed at once."""
    return 256 * (1 + groups // 8) if kind in K_QUANTS + OTHERS else 32 * groups


def inputs(tokens: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Rows that lie apart."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, columns + 3, generator=generator).bfloat16()[:, :columns]


@each_variant
@settings(max_examples=20)
@given(
    data=st.data(),
    tokens=st.integers(0, 50),
    rows=st.integers(1, 100),
    groups=st.integers(1, 70),
    power=st.integers(-60, 60),
    unpacks=st.integers(0, 1),
    seed=st.integers(0, 9),
)
def test_it_is_the_product_with_rounded_numbers(
    variant: build.Variant,
    data: st.DataObject,
    tokens: int,
    rows: int,
    groups: int,
    power: int,
    unpacks: int,
    seed: int,
) -> None:
    kind = data.draw(st.sampled_from(kinds_of(variant, KINDS + OTHERS)))
    blocks, numbers = stored(kind, rows, width(kind, groups), seed)
    x = inputs(tokens, width(kind, groups), seed) * 2.0**power
    bias = torch.randn(rows).bfloat16()
    made_of = rounded(x, variant, kind) if tokens else x.double()
    exact = made_of @ numbers.T + bias.double()
    library = built(variant)
    with unpacking(library, unpacks):
        found = product(library, kind, blocks, x, bias)
    lost = made_of.abs() @ numbers.abs().T * 2e-5
    assert ((found.double() - exact).abs() <= exact.abs() * 2.0**-8 + lost).all()


@pytest.mark.parametrize(("variant", "kind"), variants_with(KINDS + OTHERS))
def test_a_row_is_the_same_bits_whatever_is_beside_it(variant: build.Variant, kind: str) -> None:
    """Of many, for bfloat16 hides most of what differs by a last bit."""
    library = built(variant)
    columns = width(kind, 40)
    blocks, _ = stored(kind, 96, columns, 0)
    x = inputs(70, columns)
    with unpacking(library, 0):
        whole = product(library, kind, blocks, x)
    with unpacking(library, 1) as can:
        assert not can or torch.equal(product(library, kind, blocks, x), whole)
    for size in range(1, 10):
        parts = [product(library, kind, blocks, part) for part in x.split(size)]
        assert torch.equal(torch.cat(parts), whole), size


@pytest.mark.parametrize(("variant", "kind"), variants_with(KINDS))
def test_the_largest_sums_are_exact(variant: build.Variant, kind: str) -> None:
    """Weights and x at the ends of what they hold, which 16 bits must not overflow."""
    signs = np.where(np.arange(32) % 2, 1.0, -1.0)
    weights = np.stack([np.ones(32), -np.ones(32), signs, -signs]).astype(np.float32)
    x = torch.from_numpy(weights).bfloat16() * 127
    if kind in K_QUANTS:
        blocks, _ = random_blocks(kind, 4, 256, 0)
        # All bits, or none, but those of the float16 scales.
        places = {"Q3_K": 108, "Q4_K": 4, "Q5_K": 4, "Q6_K": 208}[kind]
        scales = slice(places, None) if kind in ("Q3_K", "Q6_K") else slice(0, places)
        kept = blocks[:, scales].copy()
        blocks[::2], blocks[1::2] = 255, 0
        blocks[:, scales] = kept
        x = x.repeat(1, 8)
    else:
        blocks = quantize(weights, GGMLQuantizationType[kind])
    numbers = torch.from_numpy(dequantize(blocks, GGMLQuantizationType[kind])).double()
    found = product(built(variant), kind, torch.from_numpy(blocks), x)
    made_of = rounded(x, variant, kind)
    lost = made_of.abs() @ numbers.abs().T * 1e-5
    exact = made_of @ numbers.T
    assert ((found.double() - exact).abs() <= exact.abs() * 2.0**-8 + lost).all()


@each_variant
@settings(max_examples=20)
@given(
    x=st.lists(
        st.sampled_from([0.0, 0.5, 1.0, 63.0, 64.0, 126.0, 127.0]), min_size=32, max_size=32
    ),
    signs=st.lists(st.sampled_from([-1.0, 1.0]), min_size=32, max_size=32),
    data=st.data(),
)
def test_no_pair_overflows(
    variant: build.Variant, x: list[float], signs: list[float], data: st.DataObject
) -> None:
    """Weights at the ends of what they hold, with x's signs and against them."""
    kind = data.draw(st.sampled_from(kinds_of(variant, ["Q8_0", "MXFP4"])))
    ends = np.array(signs, np.float32)
    weights = np.stack([ends, -ends, np.ones(32, np.float32), -np.ones(32, np.float32)])
    blocks = quantize(weights, GGMLQuantizationType[kind])
    numbers = torch.from_numpy(dequantize(blocks, GGMLQuantizationType[kind])).double()
    row = torch.tensor([x]).bfloat16() * torch.tensor(signs)
    made_of = rounded(row.bfloat16(), variant, kind)
    found = product(built(variant), kind, torch.from_numpy(blocks), row.bfloat16())
    lost = made_of.abs() @ numbers.abs().T * 1e-5
    exact = made_of @ numbers.T
    assert ((found.double() - exact).abs() <= exact.abs() * 2.0**-8 + lost).all()


@each_variant
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_numbers_of_up_to_2_to_the_111_have_products(variant: build.Variant, kind: str) -> None:
    blocks, numbers = stored(kind, 40, 64, 0)
    x = inputs(9, 64).sign() * 2.0**111
    made_of = rounded(x, variant, kind)
    exact = made_of @ numbers.T
    found = product(built(variant), kind, blocks, x)
    lost = made_of.abs() @ numbers.abs().T * 1e-5
    assert ((found.double() - exact).abs() <= exact.abs() * 2.0**-8 + lost).all()


@each_variant
def test_what_is_not_finite_stays_in_its_rows_and_zeros_are_zeros(variant: build.Variant) -> None:
    library = built(variant)
    blocks, _ = stored("Q4_1", 40, 64, 0)
    x = inputs(9, 64)
    x[5] = 0.0
    want = product(library, "Q4_1", blocks, x)
    x[2, 40], x[7, 3] = torch.nan, torch.inf
    found = product(library, "Q4_1", blocks, x)
    assert not found[[2, 7]].isfinite().any() and (found[5] == 0).all()
    rest = [0, 1, 3, 4, 5, 6, 8]
    assert torch.equal(found[rest], want[rest])


def test_who_has_no_instructions_for_it_takes_numbers_unless_told() -> None:
    portable, best = built(VARIANTS[-1]), built(VARIANTS[0])
    plain = gguf_formats(best)["Q4_1"].layout
    assert NativeLinear(portable, activations="auto").layout("Q4_1", 64) == plain
    assert NativeLinear(best, activations="bf16").layout("Q4_1", 64) == plain
    for kind in ("bfloat16", "int8"):
        layout = NativeLinear(best, activations="int8").layout(kind, 64)
        assert layout is not None and not layout & INTEGERS


def test_a_format_that_it_costs_too_much_takes_numbers_unless_told() -> None:
    library = built(VARIANTS[0])
    plain = gguf_formats(library)["Q2_K"].layout
    assert NativeLinear(library, activations="auto").layout("Q2_K", 256) == plain
    assert NativeLinear(library, activations="int8").layout("Q2_K", 256) == plain | INTEGERS
