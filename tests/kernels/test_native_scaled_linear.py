"""Products of quantised activations with packed weights of 8 bits are those of the numbers that
both stand for, on every variant of the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from native_variants import built, native_variants

from piecework.kernels import reference
from piecework.kernels.cpu.native import build
from piecework.kernels.cpu.native.linear import NativeLinear, multiply

KINDS = {
    "int8": torch.int8,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e4m3_blocks": torch.float8_e4m3fn,
}
VARIANTS = native_variants()


def random_weight(kind: str, rows: int, columns: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Numbers and scales as checkpoints hold them: with all numbers of the dtype but NaN."""
    generator = torch.Generator().manual_seed(seed)
    stored = torch.randint(0, 256, (rows, columns), generator=generator).to(torch.uint8)
    if kind != "int8":
        stored[stored & 127 == 127] = 0
    groups = -(-columns // 128) if kind == "fp8_e4m3_blocks" else 1
    scale = torch.rand(rows, groups, generator=generator) * 0.01 + 1e-4
    return stored.view(KINDS[kind]), scale


def quantized(x: torch.Tensor, scheme: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    if scheme == "static":
        scale = torch.tensor([0.02])
        return reference.quantize_static(x, scale, dtype), scale
    return reference.quantize_dynamic(x, 128 if scheme == "group" else x.shape[1], dtype)


def exact(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The product in float64, and what its terms sum up to without their signs."""
    groups = x_scale.shape[-1]
    wide = x.double().unflatten(-1, (groups, -1)) * x_scale.double().unsqueeze(-1)
    columns = weight.shape[1]
    each = scale.double().repeat_interleave(128, 1)[:, :columns] if scale.shape[1] > 1 else scale
    numbers = weight.double() * each
    return wide.flatten(-2) @ numbers.T, wide.flatten(-2).abs() @ numbers.abs().T


@pytest.fixture(params=VARIANTS, ids=lambda variant: variant.name, scope="module")
def variant(request: pytest.FixtureRequest) -> Iterator[build.Variant]:
    """A variant that multiplies many rows as floats: which way it would take by itself is measured,
    so it differs between machines. The test of ways has the others.
    """
    kept: build.Variant = request.param
    built(kept).piecework_choose_way(0)
    yield kept
    built(kept).piecework_choose_way(-1)


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(list(KINDS)),
    scheme=st.sampled_from(["static", "token", "group"]),
    tokens=st.integers(0, 90),
    rows=st.integers(1, 200),
    columns=st.integers(1, 2300),
    has_bias=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@example("int8", "token", 1, 32, 4, False, 0)
@example("fp8_e4m3", "token", 1, 32, 1, False, 0)
def test_it_is_the_product_of_what_the_numbers_stand_for(
    variant: build.Variant,
    kind: str,
    scheme: str,
    tokens: int,
    rows: int,
    columns: int,
    has_bias: bool,
    seed: int,
) -> None:
    columns = -(-columns // 128) * 128 if scheme == "group" else columns
    kernels = NativeLinear(built(variant))
    weight, scale = random_weight(kind, rows, columns, seed)
    layout = kernels.layout(kind, columns)
    assert layout is not None
    cut = rows // 3
    packed = kernels.pack(kind, [weight[:cut], weight[cut:]], [scale[:cut], scale[cut:]])
    assert packed.shape == kernels.packed_shape(kind, columns, rows)
    generator = torch.Generator().manual_seed(seed)
    x, x_scale = quantized(torch.randn(tokens, columns, generator=generator), scheme, KINDS[kind])
    bias = torch.randn(rows, generator=generator).bfloat16() if has_bias else None
    found = multiply(kernels._library, x, x_scale, packed, bias, rows, layout)
    expected, size = exact(x, x_scale, weight, scale)
    if bias is not None:
        expected = expected + bias.double()
    allowed = expected.abs() * 2.0**-8 + size * 1e-5
    assert ((found.double() - expected).abs() <= allowed).all()


@pytest.fixture(params=[0, 1, 2], ids=["floats", "dots", "halves"])
def way(request: pytest.FixtureRequest) -> Iterator[float]:
    """A way of many rows, and what its sums may lose of all that they are made of."""
    library = built(VARIANTS[0])
    if not library.piecework_choose_way(request.param):
        pytest.skip("this CPU lacks it")
    yield 2.0**-9 if request.param == 2 else 1e-5
    library.piecework_choose_way(-1)


@pytest.mark.parametrize("scheme", ["static", "token", "group"])
@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e4m3_blocks"])
@pytest.mark.parametrize("columns", [384, 1536])
def test_every_way_gives_the_product(way: float, kind: str, scheme: str, columns: int) -> None:
    kernels = NativeLinear(built(VARIANTS[0]))
    weight, scale = random_weight(kind, 100, columns, 0)
    generator = torch.Generator().manual_seed(0)
    x, x_scale = quantized(torch.randn(70, columns, generator=generator), scheme, KINDS[kind])
    packed = kernels.pack(kind, [weight], [scale])
    layout = kernels.layout(kind, columns)
    assert layout is not None
    found = multiply(kernels._library, x, x_scale, packed, None, 100, layout)
    expected, size = exact(x, x_scale, weight, scale)
    assert ((found.double() - expected).abs() <= expected.abs() * 2.0**-8 + size * way).all()


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("columns", [1024, 9000, 70_000])
def test_the_largest_numbers_fit_their_sums(
    variant: build.Variant, columns: int, tokens: int
) -> None:
    kernels = NativeLinear(built(variant))
    weight = torch.full((32, columns), -127, dtype=torch.int8)
    x = torch.full((tokens, columns), -127, dtype=torch.int8)
    packed = kernels.pack("int8", [weight], [torch.ones(32, 1)])
    layout = kernels.layout("int8", columns)
    assert layout is not None
    found = multiply(kernels._library, x, torch.ones(1), packed, None, 32, layout)
    assert ((found.double() / (127 * 127 * columns) - 1).abs() < 2.0**-8).all()


@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e4m3_blocks"])
@pytest.mark.parametrize("tokens", [1, 40])
def test_bfloat16_is_multiplied_by_weights_of_8_bits_too(
    variant: build.Variant, kind: str, tokens: int
) -> None:
    kernels = NativeLinear(built(variant))
    weight, scale = random_weight(kind, 40, 256, 0)
    x = torch.randn(tokens, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    layout = kernels.layout(kind, 256)
    assert layout is not None
    packed = kernels.pack(kind, [weight], [scale])
    found = multiply(kernels._library, x, None, packed, None, 40, layout)
    expected, size = exact(x, torch.ones(1), weight, scale)
    assert ((found.double() - expected).abs() <= expected.abs() * 2.0**-8 + size * 1e-5).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_what_is_not_finite_stays_in_its_rows(
    variant: build.Variant, kind: str, tokens: int
) -> None:
    kernels = NativeLinear(built(variant))
    weight, scale = random_weight(kind, 64, 256, 0)
    x = torch.randn(tokens, 256, generator=torch.Generator().manual_seed(0))
    layout = kernels.layout(kind, 256)
    assert layout is not None

    def product() -> torch.Tensor:
        numbers, x_scale = quantized(x, "token", KINDS[kind])
        packed = kernels.pack(kind, [weight], [scale])
        return multiply(kernels._library, numbers, x_scale, packed, None, 64, layout)

    want = product()
    if kind == "int8":
        scale[3] = torch.nan
    else:
        weight.view(torch.uint8)[3, 5] = 0xFF
    x[tokens - 1, 9] = torch.nan
    touched = torch.zeros(tokens, 64, dtype=torch.bool)
    touched[tokens - 1], touched[:, 3] = True, True
    found = product()
    assert not found[touched].isfinite().any()
    assert torch.equal(found[~touched], want[~touched])
