"""Triton's products with quantised weights against `kernels.reference`: on a GPU for real,
elsewhere through its interpreter.
"""

from __future__ import annotations

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_interpreter import DEVICE

from piecework.kernels import reference
from piecework.kernels.triton import linear

pytestmark = pytest.mark.on_gpu

FP8 = torch.float8_e4m3fn
NUMBERS = st.sampled_from([torch.int8, FP8, torch.float8_e5m2])
SEEDS = st.integers(0, 1000)
TOKENS = st.sampled_from([0, 1, 16, 17, 70])


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3).to(
        DEVICE, dtype
    )


def numbers(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """All bits but those of NaN and infinity."""
    drawn = torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(seed))
    if dtype == torch.int8:
        return drawn.to(DEVICE, dtype)
    codes = drawn.to(torch.int8).view(dtype)
    return torch.where(codes.float().isfinite(), codes.float(), 1.0).to(DEVICE, dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Sums of other orders, and one rounding."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    assert actual.is_contiguous()
    size = float(expected.float().abs().max()) if expected.numel() else 1.0
    rounding = 2**-10 if expected.dtype == torch.float16 else 1e-5
    torch.testing.assert_close(actual, expected, rtol=rounding, atol=rounding * size)


@settings(max_examples=examples(8, exploring=25))
@given(
    seed=SEEDS,
    tokens=TOKENS,
    columns=st.sampled_from([1, 40, 130]),
    size=st.sampled_from([32, 96, 256, 200]),
    dtype=NUMBERS,
    by_row=st.booleans(),
    by_column=st.booleans(),
    has_bias=st.booleans(),
)
def test_a_scale_for_all_or_one_a_row_and_one_a_column(
    seed: int,
    tokens: int,
    columns: int,
    size: int,
    dtype: torch.dtype,
    by_row: bool,
    by_column: bool,
    has_bias: bool,
) -> None:
    x = numbers(seed, tokens, size + 16, dtype=dtype)[:, :size]
    weight = numbers(seed + 1, columns, size, dtype=dtype)
    x_scale = random(seed + 2, *((tokens, 1) if by_row else (1,))).abs() / 1000
    weight_scale = random(seed + 3, *((columns, 1) if by_column else (1,))).abs() / 1000
    bias = random(seed + 4, columns, dtype=torch.float16) if has_bias else None
    out = torch.float32 if dtype == torch.float8_e5m2 else torch.float16
    arguments = (x, x_scale, weight, weight_scale, bias, out)
    assert_close(linear.scaled_linear(*arguments), reference.scaled_linear(*arguments))


@settings(max_examples=examples(8, exploring=25))
@given(
    seed=SEEDS,
    tokens=TOKENS,
    columns=st.sampled_from([16, 40, 130]),
    blocks=st.integers(2, 4),
    group=st.sampled_from([32, 64, 128]),
    rows=st.sampled_from([1, 16, 128]),
    short=st.booleans(),
    dtype=NUMBERS,
    grouped=st.booleans(),
)
def test_a_scale_for_each_block(
    seed: int,
    tokens: int,
    columns: int,
    blocks: int,
    group: int,
    rows: int,
    short: bool,
    dtype: torch.dtype,
    grouped: bool,
) -> None:
    """Of the weight, whose last blocks may be smaller, and of x, or of the weight alone."""
    size = blocks * group - (0 if grouped else short * 8)
    x = numbers(seed, tokens, size, dtype=dtype)
    weight = numbers(seed + 1, columns, size, dtype=dtype)
    x_scale = random(seed + 2, *((tokens, blocks) if grouped else (1,))).abs() / 1000
    weight_scale = random(seed + 3, -(-columns // rows), blocks).abs() / 1000
    arguments = (x, x_scale, weight, weight_scale, None, torch.float32)
    assert_close(linear.scaled_linear(*arguments), reference.scaled_linear(*arguments))


@settings(max_examples=examples(8, exploring=25))
@given(
    seed=SEEDS,
    tokens=TOKENS,
    columns=st.sampled_from([1, 40, 130]),
    groups=st.integers(1, 3),
    group=st.sampled_from([16, 32, 128, 192]),
    bits=st.sampled_from([4, 8]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    has_bias=st.booleans(),
)
def test_weights_of_few_bits(
    seed: int,
    tokens: int,
    columns: int,
    groups: int,
    group: int,
    bits: int,
    dtype: torch.dtype,
    has_bias: bool,
) -> None:
    size = groups * group
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(0, 256, (columns, size * bits // 8), generator=generator).to(torch.uint8)
    zero = torch.randint(0, 2**bits, (columns, groups), generator=generator).to(torch.uint8)
    scale = random(seed + 1, columns, groups, dtype=dtype) / 100
    x = random(seed, tokens, size + 8, dtype=dtype)[:, :size]
    bias = random(seed + 2, columns, dtype=dtype) if has_bias else None
    arguments = (x, weight.to(DEVICE), scale, zero.to(DEVICE), bias, bits)
    assert_close(linear.weight_only_linear(*arguments), reference.weight_only_linear(*arguments))


@pytest.mark.parametrize("size", [40, 576 + 2])
@pytest.mark.parametrize("bits", [4, 8])
def test_one_group_may_end_within_a_tile(size: int, bits: int) -> None:
    weight = torch.arange(3 * size * bits // 8).to(torch.uint8).view(3, -1).to(DEVICE)
    scale, zero = random(0, 3, 1), torch.tensor([[8], [0], [3]], dtype=torch.uint8, device=DEVICE)
    arguments = (random(1, 5, size), weight, scale, zero, None, bits)
    assert_close(linear.weight_only_linear(*arguments), reference.weight_only_linear(*arguments))


def test_groups_that_are_no_tiles_are_plain_torch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("scaled_linear_kernel", "weight_only_linear_kernel"):
        monkeypatch.delattr(linear, name)
    x, weight = numbers(0, 2, 48, dtype=FP8), numbers(1, 8, 48, dtype=FP8)
    scaled = (x, random(2, 2, 3), weight, random(3, 8, 3), None, torch.float32)
    assert torch.equal(linear.scaled_linear(*scaled), reference.scaled_linear(*scaled))
    packed = torch.ones(8, 12, dtype=torch.uint8, device=DEVICE)
    zero = torch.ones(8, 3, dtype=torch.uint8, device=DEVICE)
    few = (random(0, 2, 24), packed, random(1, 8, 3), zero, None, 4)
    assert torch.equal(linear.weight_only_linear(*few), reference.weight_only_linear(*few))


@pytest.mark.parametrize("dtype", [FP8, torch.float8_e5m2])
def test_every_number_of_8_bits_is_widened_to_itself(dtype: torch.dtype) -> None:
    """As on a card without them; NaN of a weight is seen in what it is multiplied with, and there
    alone.
    """
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype).to(DEVICE)
    weight = torch.zeros(256, 32, dtype=dtype, device=DEVICE)
    weight[:, 0] = codes
    x = torch.zeros(1, 32, device=DEVICE)
    x[0, 0] = 1.0
    one = torch.ones(1, device=DEVICE)
    result = linear.scaled_linear(x.to(dtype), one, weight, one, None, torch.float32)
    torch.testing.assert_close(result[0], codes.float(), rtol=0, atol=0, equal_nan=True)


def test_padded_rows_of_noise_change_no_other_row() -> None:
    x, weight = numbers(0, 20, 64, dtype=FP8), numbers(1, 40, 64, dtype=FP8)
    scales = random(2, 20, 1).abs()
    of_weight = random(3, 40, 1).abs()
    clean = linear.scaled_linear(x, scales, weight, of_weight, None, torch.float32)
    scales[7:] = float("nan")
    poisoned = linear.scaled_linear(x, scales, weight, of_weight, None, torch.float32)
    assert torch.equal(clean[:7], poisoned[:7]) and bool(poisoned[7:].isnan().all())


def test_the_summary_says_where_fp8_is_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    from piecework.kernels.cuda.platform import CudaPlatform

    platform = CudaPlatform()
    monkeypatch.setattr(linear, "widening", set())
    monkeypatch.setattr(platform, "device", lambda: torch.device(DEVICE))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (8, 6))
    monkeypatch.setattr(linear, "_multiplies_fp8", lambda device: False)
    one = torch.ones(1, device=DEVICE)

    def multiply(dtype: torch.dtype) -> None:
        x, weight = numbers(0, 1, 32, dtype=dtype), numbers(1, 8, 32, dtype=dtype)
        linear.scaled_linear(x, one, weight, one, None, torch.float16)

    multiply(torch.int8)
    assert platform.remarks() == {}
    multiply(FP8)
    assert "compute capability 8.6) has no FP8" in platform.remarks()["fp8"]
