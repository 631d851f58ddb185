"""Products with packed weights are those with the numbers that the weights stand for, on every
variant of the kernels.
"""

from __future__ import annotations

import ctypes
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from gguf_blocks import FORMATS, random_blocks
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from native_variants import (
    built,
    built_variants,
    kinds_of,
    native_variants,
    needs_kernels,
    variants_with,
)

from piecework.kernels.cpu.native import build
from piecework.kernels.cpu.native import linear as native
from piecework.kernels.cpu.native.embedding import look_up
from piecework.kernels.cpu.native.linear import NativeLinear

KINDS = ["bfloat16", "Q8_0", "Q4_0", "Q4_1"]
BLOCKS = [name for name in FORMATS if name not in KINDS]
VARIANTS = native_variants()


@cache
def fastest_variant() -> ctypes.CDLL:
    return built(VARIANTS[0])


def weight(kind: str, rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight as it is stored, and its numbers in float64."""
    if kind in BLOCKS:
        blocks, values = random_blocks(kind, rows, columns, seed)
        return torch.from_numpy(blocks), torch.from_numpy(values).double()
    return stored_as(
        kind, np.random.default_rng(seed).normal(0, 0.1, (rows, columns)).astype(np.float32)
    )


def width(kind: str, groups: int) -> int:
    """Columns: any number, or whole blocks. Some are more than what is summed at once."""
    if kind == "bfloat16":
        return 17 * groups + 1
    return 256 * (1 + groups // 8) if kind in BLOCKS else 32 * groups


def stored_as(kind: str, numbers: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    if kind == "bfloat16":
        stored = torch.from_numpy(numbers).bfloat16()
        return stored, stored.double()
    blocks = quantize(numbers, GGMLQuantizationType[kind])
    return torch.from_numpy(blocks), torch.from_numpy(
        dequantize(blocks, GGMLQuantizationType[kind])
    ).double()


def multiply(
    library: ctypes.CDLL,
    x: torch.Tensor,
    packed: torch.Tensor,
    bias: torch.Tensor | None,
    rows: int,
    layout: int,
) -> torch.Tensor:
    return native.multiply(library, x, None, packed, bias, rows, layout)


def close(
    found: torch.Tensor,
    exact: torch.Tensor,
    x: torch.Tensor,
    numbers: torch.Tensor,
    loss: float = 1e-5,
) -> bool:
    """Within bfloat16's rounding of the result, and what sums may lose of all that they are made
    of.
    """
    allowed = exact.abs() * 2.0**-8 + (x.double().abs() @ numbers.abs().T) * loss
    return bool(((found.double() - exact).abs() <= allowed).all())


@pytest.fixture(autouse=True, scope="module")
def most_exact_way() -> Iterator[None]:
    """Tests that name no way have the one of few rows for all of them, however fast others are
    here.
    """
    for way in (0, -1):
        for library in built_variants():
            library.piecework_choose_way(way)
        if way == 0:
            yield


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
@settings(max_examples=20)
@given(
    data=st.data(),
    tokens=st.integers(0, 90),
    rows=st.integers(1, 200),
    groups=st.integers(1, 70),
    has_bias=st.booleans(),
    seed=st.integers(0, 9),
)
def test_it_is_the_product(
    variant: build.Variant,
    data: st.DataObject,
    tokens: int,
    rows: int,
    groups: int,
    has_bias: bool,
    seed: int,
) -> None:
    kernels = NativeLinear(built(variant))
    kind = data.draw(st.sampled_from(kinds_of(variant, KINDS + BLOCKS)))
    columns = width(kind, groups)
    stored, numbers = weight(kind, rows, columns, seed)
    layout = kernels.layout(kind, columns)
    assert layout is not None
    packed = kernels.pack(kind, [stored])
    assert packed.shape == kernels.packed_shape(kind, columns, rows)
    generator = torch.Generator().manual_seed(seed)
    # Rows of x may lie apart, as those of a slice do.
    x = torch.randn(tokens, columns + 3, generator=generator).bfloat16()[:, :columns]
    bias = torch.randn(rows, generator=generator).bfloat16() if has_bias else None
    exact = x.double() @ numbers.T + (0 if bias is None else bias.double())
    found = multiply(kernels._library, x, packed, bias, rows, layout)
    assert close(found, exact, x, numbers)


@pytest.mark.parametrize(("variant", "kind"), variants_with(KINDS + BLOCKS))
def test_rows_of_an_embedding_are_those_that_were_packed(kind: str, variant: build.Variant) -> None:
    """Of panels that are full and of the last one; rows that are not there are refused."""
    kernels = NativeLinear(built(variant))
    rows, columns = 70, width(kind, 11)
    stored, numbers = weight(kind, rows, columns, 1)
    packed, layout = kernels.pack(kind, [stored]), kernels.layout(kind, columns)
    assert layout is not None
    ids = torch.randperm(rows, generator=torch.Generator().manual_seed(1)).repeat(2)
    found = look_up(kernels._library, ids, packed, columns, rows, layout)
    torch.testing.assert_close(found.double(), numbers[ids], rtol=2.0**-8, atol=1e-30)
    for outside in (-1, rows, 2**40):
        with pytest.raises(IndexError, match="70 rows"):
            look_up(kernels._library, torch.tensor([0, outside]), packed, columns, rows, layout)


class Way(NamedTuple):
    """One of `Way` in linear.h, how it rounds weights, and what its sums may lose of all that they
    are made of.
    """

    name: str
    number: int
    rounded: Callable[[torch.Tensor], torch.Tensor]
    loss: float


WAYS = [
    Way("floats", 0, lambda numbers: numbers, 1e-5),
    Way("dots", 1, lambda numbers: numbers.float().bfloat16().double(), 1e-5),
    # It rounds weights of 4 and 8 bits too, to far less than its sums lose.
    Way("halves", 2, lambda numbers: numbers, 2.0**-9),
]


@pytest.fixture(params=WAYS, ids=lambda way: way.name)
def way(request: pytest.FixtureRequest) -> Iterator[Way]:
    """A way that is taken for many rows, be it the fastest here or not."""
    if not fastest_variant().piecework_choose_way(request.param.number):
        pytest.skip("this CPU lacks it")
    yield request.param
    fastest_variant().piecework_choose_way(0)


def product(
    kind: str, stored: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    kernels = NativeLinear(fastest_variant())
    layout = kernels.layout(kind, x.shape[1])
    assert layout is not None
    return multiply(fastest_variant(), x, kernels.pack(kind, [stored]), bias, len(stored), layout)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(KINDS + BLOCKS),
    tokens=st.integers(6, 90),
    rows=st.integers(1, 200),
    groups=st.integers(1, 70),
    seed=st.integers(0, 9),
)
def test_every_way_gives_the_product(
    way: Way, kind: str, tokens: int, rows: int, groups: int, seed: int
) -> None:
    columns = width(kind, groups)
    stored, numbers = weight(kind, rows, columns, seed)
    if tokens >= 24:
        numbers = way.rounded(numbers)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, columns + 3, generator=generator).bfloat16()[:, :columns]
    bias = torch.randn(rows, generator=generator).bfloat16()
    found = product(kind, stored, x, bias)
    assert close(found, x.double() @ numbers.T + bias.double(), x, numbers, way.loss)


@pytest.mark.parametrize("kind", KINDS)
def test_no_way_errs_more_than_a_result_is_rounded(way: Way, kind: str) -> None:
    stored, numbers = weight(kind, 256, 1536, 0)
    x = torch.randn(64, 1536, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = x.double() @ way.rounded(numbers).T
    rounding = (exact.bfloat16().double() - exact).square().mean().sqrt()
    assert (product(kind, stored, x).double() - exact).square().mean().sqrt() < 1.5 * rounding


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    weight_power=st.integers(-50, 50),
    x_power=st.integers(-50, 50),
    outlier=st.sampled_from([0.0, 1.0, 5000.0]),
)
@example(weight_power=-50, x_power=-50, outlier=0.0)
@example(weight_power=50, x_power=50, outlier=5000.0)
def test_numbers_may_be_of_any_size(
    way: Way, weight_power: int, x_power: int, outlier: float
) -> None:
    """Rows as small and as large as no float16 is, and a row's largest far above its others."""
    stored, numbers = weight("bfloat16", 40, 200, 0)
    powers = 2.0 ** torch.linspace(0, weight_power, 40)[:, None].round()
    stored, numbers = (stored.float() * powers).bfloat16(), numbers * powers.double()
    x = torch.randn(30, 200, generator=torch.Generator().manual_seed(0))
    x[:, 7] += outlier
    x = (x * 2.0 ** torch.linspace(0, x_power, 30)[:, None].round()).bfloat16()
    found = product("bfloat16", stored, x)
    assert close(found, x.double() @ numbers.T, x, numbers, way.loss)


def test_an_outlier_leaves_the_rest_of_its_row_their_digits(way: Way) -> None:
    numbers = np.random.default_rng(0).normal(0, 0.1, (40, 200)).astype(np.float32)
    numbers[:, 7] = 0.0
    stored, exact = stored_as("bfloat16", numbers)
    x = torch.randn(30, 200, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[:, 7] = 0.0
    others = x.clone()
    x[:, 7] = 2.0**20
    assert close(product("bfloat16", stored, x), others.double() @ exact.T, others, exact, way.loss)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sign", [1, -1])
def test_weights_may_be_of_one_sign(way: Way, kind: str, sign: int) -> None:
    """Those of Q4_1 then lie between a minimum of 0 and fifteen scales, or the other way round."""
    stored, numbers = stored_as(
        kind, sign * np.abs(np.random.default_rng(0).normal(0, 0.1, (40, 256)).astype(np.float32))
    )
    x = torch.randn(30, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert close(
        product(kind, stored, x), x.double() @ way.rounded(numbers).T, x, numbers, way.loss
    )


def test_what_is_not_finite_stays_in_its_rows(way: Way) -> None:
    stored, _ = weight("bfloat16", 64, 64, 0)
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    want = product("bfloat16", stored, x)
    stored[3, 5], x[4, 9], x[6, 9] = torch.inf, torch.nan, torch.inf
    found = product("bfloat16", stored, x)
    touched = torch.zeros(32, 64, dtype=torch.bool)
    touched[[4, 6]], touched[:, 3] = True, True
    assert not found[touched].isfinite().any()
    assert torch.equal(found[~touched], want[~touched])


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
@pytest.mark.parametrize("way", [WAYS[1]], indirect=True, ids=lambda way: way.name)
def test_products_of_few_rows_round_no_weights(way: Way, kind: str) -> None:
    stored, numbers = weight(kind, 64, 256, 0)
    x = torch.randn(24, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    few = torch.cat([product(kind, stored, rows) for rows in x.split(12)])
    assert close(few, x.double() @ numbers.T, x, numbers)
    assert not torch.equal(few, product(kind, stored, x))


@pytest.mark.parametrize(("variant", "kind"), variants_with(BLOCKS))
def test_blocks_keep_their_values(variant: build.Variant, kind: str) -> None:
    """To the rounding of float32, which what is left of a few beside their bfloat16 shows."""
    kernels = NativeLinear(built(variant))
    stored, numbers = weight(kind, 33, 256, 0)
    packed, layout, one = kernels.pack(kind, [stored]), kernels.layout(kind, 256), torch.eye(256)
    assert layout is not None
    found = multiply(kernels._library, one.bfloat16(), packed, None, 33, layout)
    assert torch.equal(found, numbers.T.bfloat16())
    for column, tokens in itertools.product((0, 17, 101, 255), (1, 3)):
        near, x = numbers[:, column].bfloat16(), one[column].expand(tokens, -1).bfloat16()
        left = multiply(kernels._library, x, packed, -near, 33, layout).double()
        want = numbers[:, column] - near.double()
        assert ((left - want).abs() <= want.abs() * 2.0**-8 + numbers.abs().max() * 2.0**-23).all()


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


@pytest.mark.parametrize("tokens", [1, 8, 40])
def test_parts_may_be_of_several_kinds(way: Way, tokens: int) -> None:
    kernels = NativeLinear(fastest_variant())
    sizes = {"Q4_K": 64, "Q6_K": 32, "Q5_1": 40}
    parts, numbers = zip(
        *(weight(kind, rows, 512, rows) for kind, rows in sizes.items()), strict=True
    )
    kind = "mixed " + " ".join(f"{kind} {rows}" for kind, rows in sizes.items())
    layout, packed = kernels.layout(kind, 512), kernels.pack(kind, parts)
    assert layout is not None and packed.shape == kernels.packed_shape(kind, 512, 136)
    x = torch.randn(tokens, 512).bfloat16()
    exact = x.double() @ way.rounded(torch.cat(numbers)).T
    if tokens < 24:
        exact = x.double() @ torch.cat(numbers).T
    found = multiply(fastest_variant(), x, packed, None, 136, layout)
    assert close(found, exact, x, torch.cat(numbers), way.loss)
    assert kernels.layout("mixed Q4_K 40 Q6_K 32", 512) is None


@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_any_number_of_threads_gives_the_same_bits(tokens: int) -> None:
    stored, _ = weight("bfloat16", 2000, 300, seed=0)
    packed = NativeLinear(fastest_variant()).pack("bfloat16", [stored])
    x = torch.randn(tokens, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 3, 13):
        torch.set_num_threads(threads)
        found.append(
            native.multiply(fastest_variant(), x, None, packed, None, 2000, native.Layout.BF16)
        )
    torch.set_num_threads(before)
    assert all(torch.equal(found[0], each) for each in found)


def test_blocks_that_do_not_fill_a_row_are_not_known() -> None:
    kernels = native.native_linear()
    assert kernels is not None
    assert kernels.layout("Q4_1", 48) is None and kernels.layout("Q6_K", 128) is None
    assert kernels.layout("bfloat16", 47) is not None


@needs_kernels
def test_extreme_scales_of_q4_0_keep_their_values() -> None:
    """Its minimum is minus eight scales, worked out in float16."""
    kernels = native.native_linear()
    assert kernels is not None
    scales = np.array(
        [0.0, 2.0**-14, -0.37, 1000.0, 2.0**-24, 3 * 2.0**-24, -1023 * 2.0**-24, 127 * 2.0**-24],
        dtype=np.float16,
    )
    blocks = np.zeros((len(scales), 18), dtype=np.uint8)
    blocks[:, :2] = scales[:, None].view(np.uint8)
    blocks[:, 2:] = np.arange(16, dtype=np.uint8) * 17
    numbers = torch.from_numpy(dequantize(blocks, GGMLQuantizationType.Q4_0)).double()
    packed = kernels.pack("Q4_0", [torch.from_numpy(blocks)])
    x = torch.eye(32).bfloat16()
    assert torch.equal(
        kernels.op(x, packed, None, len(scales), kernels.layout("Q4_0", 32)), numbers.T.bfloat16()
    )


def test_many_rows_of_a_wide_weight_are_cut_into_chunks(way: Way) -> None:
    stored, numbers = weight("Q4_1", 64, 2080, 0)
    x = torch.randn(900, 2080).bfloat16()
    assert close(
        product("Q4_1", stored, x),
        x.double() @ way.rounded(numbers).T,
        x,
        way.rounded(numbers),
        way.loss,
    )


_AT_THE_END_OF_MEMORY = """
import ctypes, mmap, sys
import numpy as np, torch
from piecework.kernels.cpu.native.linear import native_linear

kernels, page = native_linear(), mmap.PAGESIZE
for kind, row in (("Q8_0", 68), ("Q4_0", 36), ("Q4_1", 40), ("Q6_K", 210), ("Q3_K", 110)):
    memory = mmap.mmap(-1, 2 * page)
    behind = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)) + page)
    assert ctypes.CDLL(None).mprotect(behind, ctypes.c_size_t(page), 0) == 0
    rows = min(33, page // row)
    blocks = np.frombuffer(memory, np.uint8, rows * row, page - rows * row).reshape(rows, row)
    kernels.pack(kind, [torch.from_numpy(blocks)])
"""


def test_packing_reads_nothing_behind_the_blocks() -> None:
    """They may be the last of a file that is mapped."""
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _AT_THE_END_OF_MEMORY],
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
