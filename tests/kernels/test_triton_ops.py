"""Triton's ops against `kernels.reference`: on a GPU for real, elsewhere through Triton's
interpreter.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_interpreter import DEVICE

from piecework.kernels import ops, reference
from piecework.kernels.triton import ops as triton_ops

# The interpreter cuts a bfloat16 off where hardware rounds to the nearest.
DTYPES = st.sampled_from([torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda"))
SEEDS = st.integers(0, 1000)


def random(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3).to(
        DEVICE, dtype
    )


ROUNDINGS = {torch.float32: 1e-5, torch.float16: 2**-7, torch.bfloat16: 2**-6}
"""A number is rounded to its dtype twice, before its last product and after, and a sum in another
order may turn the first.
"""


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape and actual.is_contiguous()
    torch.testing.assert_close(actual, expected, rtol=ROUNDINGS[actual.dtype], atol=1e-3)


def test_the_tolerance_is_what_the_last_digit_of_a_sum_makes_of_bfloat16() -> None:
    """Among millions of numbers some are off by three of bfloat16's last digits, though nothing is
    wrong.
    """
    gate, up = (random(seed, 1000, 2000, dtype=torch.bfloat16).cpu() for seed in (1, 2))
    exact = gate.float() * gate.float().sigmoid()
    one, other = ((exact * (1 + off)).bfloat16().float() * up.float() for off in (0.0, 2**-22))
    assert_same(one.bfloat16(), other.bfloat16())
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(one.bfloat16(), other.bfloat16(), rtol=2**-7, atol=1e-3)


@settings(max_examples=10)
@given(
    seed=SEEDS,
    tokens=st.integers(0, 3),
    size=st.integers(2, 70),
    dtype=DTYPES,
    eps=st.sampled_from([1e-6, 1e-2]),
)
def test_add_rms_norm(seed: int, tokens: int, size: int, dtype: torch.dtype, eps: float) -> None:
    # Rows need not lie one behind the other.
    x, residual = (
        random(seed, tokens, size + 3, dtype=dtype)[:, :size],
        random(seed + 1, tokens, size, dtype=dtype),
    )
    weight = random(seed + 2, size, dtype=dtype)
    before = x.clone()
    normed, total = triton_ops.add_rms_norm(x, residual, weight, eps)
    expected, expected_total = reference.add_rms_norm(x, residual, weight, eps)
    assert torch.equal(total, expected_total) and torch.equal(x, before)
    assert_same(normed, expected)


@settings(max_examples=10)
@given(
    seed=SEEDS,
    tokens=st.integers(0, 3),
    heads=st.integers(0, 3),
    size=st.integers(2, 70),
    dtype=DTYPES,
)
def test_rms_norm_of_rows_and_of_heads(
    seed: int, tokens: int, heads: int, size: int, dtype: torch.dtype
) -> None:
    shape = (tokens, heads, size) if heads else (tokens, size)
    x = (
        random(seed, tokens, heads + 2, size, dtype=dtype)[:, 1 : heads + 1]
        if heads
        else random(seed, *shape, dtype=dtype)
    )
    weight = random(seed + 1, size, dtype=dtype)
    assert_same(triton_ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


@settings(max_examples=10)
@given(
    seed=SEEDS,
    tokens=st.integers(0, 3),
    size=st.one_of(st.integers(1, 70), st.just(1500)),
    dtype=DTYPES,
)
def test_silu_and_mul(seed: int, tokens: int, size: int, dtype: torch.dtype) -> None:
    x = random(seed, tokens, 2 * size, dtype=dtype)
    assert_same(triton_ops.silu_and_mul(x), reference.silu_and_mul(x))


@settings(max_examples=10)
@given(
    seed=SEEDS,
    tokens=st.integers(0, 3),
    heads=st.integers(1, 5),
    half=st.integers(1, 40),
    dtype=DTYPES,
)
def test_rotary_embedding(
    seed: int, tokens: int, heads: int, half: int, dtype: torch.dtype
) -> None:
    x = random(seed, tokens, heads + 2, 2 * half, dtype=dtype)[:, :heads]
    cos, sin = (random(seed + i, tokens, 1, 2 * half, dtype=dtype) for i in (1, 2))
    assert_same(triton_ops.rotary_embedding(x, cos, sin), reference.rotary_embedding(x, cos, sin))


def test_ops_are_the_device_s_own_unless_plain_torch_is_asked_for() -> None:
    calls = []

    class Spy:
        def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(x)
            return reference.silu_and_mul(x)

    x = torch.ones(1, 4, device="meta")
    ops.register("meta", Spy())
    try:
        ops.silu_and_mul(x)
        with ops.plain_torch():
            ops.silu_and_mul(x)
        assert len(calls) == 1
        ops.silu_and_mul(x)
        assert len(calls) == 2
    finally:
        ops._versions.pop("meta")


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no NVIDIA GPU")
@pytest.mark.parametrize("tokens", [1, 37, 1000])
def test_shapes_of_an_8b_model(tokens: int) -> None:
    x, residual, weight = (
        random(i, *shape, dtype=torch.bfloat16)
        for i, shape in enumerate([(tokens, 4096), (tokens, 4096), (4096,)])
    )
    for actual, expected in zip(
        triton_ops.add_rms_norm(x, residual, weight, 1e-5),
        reference.add_rms_norm(x, residual, weight, 1e-5),
        strict=True,
    ):
        assert_same(actual, expected)
    gates = random(3, tokens, 2 * 14336, dtype=torch.bfloat16)
    assert_same(triton_ops.silu_and_mul(gates), reference.silu_and_mul(gates))
    heads, cos, sin = (
        random(i, tokens, *shape, dtype=torch.bfloat16)
        for i, shape in enumerate([(40, 128), (1, 128), (1, 128)])
    )
    assert_same(
        triton_ops.rotary_embedding(heads, cos, sin), reference.rotary_embedding(heads, cos, sin)
    )
