"""Triton's quantising ops against `kernels.reference`: on a GPU for real, elsewhere through its
interpreter.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_interpreter import DEVICE

from piecework.kernels import reference
from piecework.kernels.triton import ops as triton_ops
from piecework.kernels.triton import quantize

DTYPES = st.sampled_from([torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda"))
QUANTIZED = st.sampled_from(sorted(reference.LARGEST, key=str))
SEEDS = st.integers(0, 1000)
NEIGHBOUR = {torch.int8: 1.0, torch.float8_e4m3fn: 32.0, torch.float8_e5m2: 8192.0}
"""The largest distance of two numbers beside each other."""


def random(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3).to(
        DEVICE, dtype
    )


def assert_neighbours(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """A norm and an exponential may end in another digit, which may turn the rounding behind it."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    assert actual.is_contiguous()
    if actual.dtype not in NEIGHBOUR:
        torch.testing.assert_close(actual, expected, rtol=2**-7, atol=1e-3)
        return
    off = (actual.float() - expected.float()).abs()
    assert not off.numel() or off.max() <= NEIGHBOUR[actual.dtype]
    # Float32 has no rounding between that would move many.
    assert (off > 0).float().mean() <= 0.1 if off.numel() > 40 else True


def both(op: str, *arguments: Any) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    results = (getattr(version, op)(*arguments) for version in (triton_ops, reference))
    one, other = (each if isinstance(each, tuple) else (each,) for each in results)
    return one, other


@pytest.mark.parametrize("dtype", reference.LARGEST)
def test_every_number_is_rounded_as_torch_rounds_it(dtype: torch.dtype) -> None:
    """All of float16's, infinite ones too: numbers, halves between them, and what has no leading
    one.
    """
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    x = x[~x.isnan()].view(1, -1).to(DEVICE)
    for scale in (1.0, 2.0**-10, 3.0):
        given_scale = torch.tensor([scale], device=DEVICE)
        expected = reference.quantize_static(x, given_scale, dtype)
        actual = triton_ops.quantize_static(x, given_scale, dtype)
        assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


@settings(max_examples=15)
@given(
    seed=SEEDS,
    tokens=st.integers(0, 3),
    groups=st.integers(1, 5),
    group=st.sampled_from([1, 16, 32, 128, 24]),
    whole=st.booleans(),
    dtype=DTYPES,
    quantized=QUANTIZED,
)
def test_groups_and_rows_are_quantised_to_the_bit(
    seed: int,
    tokens: int,
    groups: int,
    group: int,
    whole: bool,
    dtype: torch.dtype,
    quantized: torch.dtype,
) -> None:
    size = groups * group
    x = random(seed, tokens, size + 3, dtype=dtype)[:, :size]
    before = x.clone()
    actual, expected = both("quantize_dynamic", x, size if whole else group, quantized)
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other) and one.is_contiguous()
    assert torch.equal(x, before)


@settings(max_examples=15)
@given(
    seed=SEEDS,
    tokens=st.integers(0, 3),
    size=st.sampled_from([2, 48, 70, 256]),
    group=st.sampled_from([0, 16, 256]),
    add=st.booleans(),
    dtype=DTYPES,
    quantized=QUANTIZED,
)
def test_a_norm_then_quantised(
    seed: int,
    tokens: int,
    size: int,
    group: int,
    add: bool,
    dtype: torch.dtype,
    quantized: torch.dtype,
) -> None:
    x = random(seed, tokens, size + 3, dtype=dtype)[:, :size]
    inputs = (x, *[random(seed + 1, tokens, size, dtype=dtype)] * add)
    last: tuple[Any, ...] = (group if group and size % group == 0 else size, quantized)
    op = "add_" * add + "rms_norm_quantize_"
    if group == 0:
        op, last = op + "static", (torch.tensor([0.11], device=DEVICE), quantized)
    else:
        op += "dynamic"
    actual, expected = both(op, *inputs, random(seed + 2, size, dtype=dtype), 1e-5, *last)
    for one, other in zip(actual, expected, strict=True):
        assert_neighbours(one, other)
    if add:
        assert torch.equal(actual[-1], expected[-1])


@settings(max_examples=15)
@given(
    seed=SEEDS,
    tokens=st.integers(0, 3),
    size=st.sampled_from([1, 48, 70, 256, 1500]),
    group=st.sampled_from([0, 16, 256, 1500]),
    dtype=DTYPES,
    quantized=QUANTIZED,
)
def test_a_gated_activation_then_quantised(
    seed: int, tokens: int, size: int, group: int, dtype: torch.dtype, quantized: torch.dtype
) -> None:
    x = random(seed, tokens, 2 * size, dtype=dtype)
    if group:
        group = group if size % group == 0 else size
        actual, expected = both("silu_and_mul_quantize_dynamic", x, group, quantized)
    else:
        scale = torch.tensor([0.07], device=DEVICE)
        actual, expected = both("silu_and_mul_quantize_static", x, scale, quantized)
    for one, other in zip(actual, expected, strict=True):
        assert_neighbours(one, other)


def test_groups_that_are_no_power_of_two_are_plain_torch_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They have no tile; the answer is the same."""
    kernels = ("quantize_kernel", "rms_norm_quantize_kernel", "silu_and_mul_quantize_kernel")
    for name in kernels:
        monkeypatch.delattr(quantize, name)
    x, weight = random(0, 2, 96, dtype=torch.float32), random(1, 96, dtype=torch.float32)
    calls: dict[str, tuple[Any, ...]] = {
        "quantize_dynamic": (x, 24, torch.int8),
        "rms_norm_quantize_dynamic": (x, weight, 1e-5, 24, torch.int8),
        "add_rms_norm_quantize_dynamic": (x, x, weight, 1e-5, 24, torch.int8),
        "silu_and_mul_quantize_dynamic": (x, 24, torch.int8),
    }
    for op, arguments in calls.items():
        actual, expected = both(op, *arguments)
        assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


@pytest.mark.parametrize("quantized", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_nan_stays_nan_and_keeps_to_its_row(quantized: torch.dtype) -> None:
    x = random(0, 3, 64, dtype=torch.float32)
    x[1, 5] = float("nan")
    numbers, scale = triton_ops.quantize_dynamic(x, 64, quantized)
    wide = numbers.float() * scale
    assert bool(wide[1].isnan().any()) and bool(wide[[0, 2]].isfinite().all())
    fixed = triton_ops.quantize_static(x, torch.ones(1, device=DEVICE), quantized)
    assert fixed.float().isnan().nonzero().tolist() == [[1, 5]]


@settings(max_examples=15)
@given(
    seed=SEEDS,
    tokens=st.integers(0, 3),
    heads=st.integers(1, 5),
    kv_heads=st.integers(1, 3),
    half=st.sampled_from([1, 5, 32, 40]),
    dtype=DTYPES,
)
def test_norm_and_rotation_of_heads(
    seed: int, tokens: int, heads: int, kv_heads: int, half: int, dtype: torch.dtype
) -> None:
    """Queries and keys lie beside each other in what one product has made."""
    beside = random(seed, tokens, heads + 2 * kv_heads, 2 * half, dtype=dtype)
    q, k = beside[:, :heads], beside[:, heads : heads + kv_heads]
    weights = [random(seed + i, 2 * half, dtype=dtype) for i in (1, 2)]
    cos, sin = (random(seed + i, tokens, 1, 2 * half, dtype=dtype) for i in (3, 4))
    (actual,), (expected,) = both("norm_rotary_embedding", q, k, *weights, 1e-6, cos, sin)
    assert actual.shape == (tokens, heads + kv_heads, 2 * half) and actual.is_contiguous()
    tolerance = {torch.float32: 1e-5, torch.float16: 2**-7, torch.bfloat16: 2**-6}[dtype]
    size = expected.abs().max() if expected.numel() else 1.0
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=float(tolerance * size))
