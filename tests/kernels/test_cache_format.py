"""Keys and values in 8 bits: what is kept, what is read, what attention gives over it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_steps import kept

from piecework.kernels import cache_format
from piecework.kernels.attention import KVLayout
from piecework.kernels.cache_format import CACHE_DTYPES

FORMATS = list(CACHE_DTYPES.values())
HALF_STEP = {torch.float8_e4m3fn: 2**-4, torch.float8_e5m2: 2**-3}
"""The most that rounding changes a number by, as a share of it."""


@settings(max_examples=60)
@given(
    dtype=st.sampled_from(FORMATS),
    scale=st.sampled_from([1.0, 0.03, 5.0]),
    size=st.sampled_from([2, 8, 26]),
    spread=st.sampled_from([0.01, 1.0, 40.0]),
    seed=st.integers(0, 100),
)
def test_a_number_is_read_as_it_was_but_for_a_step_of_its_format(
    dtype: torch.dtype, scale: float, size: int, spread: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(7, 3, size, generator=generator) * spread
    error = (kept(x, dtype, scale) - x).abs()
    if dtype == torch.int8:
        # Half a step, and what rounding the scale to 8 digits takes from the largest number.
        assert (error <= x.abs().amax(-1, keepdim=True) * (0.51 / 127 + 2**-8)).all()
    else:
        info = torch.finfo(dtype)
        inside = x.abs() <= scale * info.max
        least = scale * info.smallest_normal * info.eps
        assert (error <= (HALF_STEP[dtype] * x.abs()).clamp(min=least))[inside].all()


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_what_is_too_large_becomes_the_largest_of_its_sign(dtype: torch.dtype) -> None:
    x = torch.tensor([1e30, -1e30, 0.0, 1.0]).view(1, 1, 4)
    found = kept(x, dtype, 2.0)[0, 0]
    largest = 1e30 if dtype == torch.int8 else 2.0 * torch.finfo(dtype).max
    assert found[0] == -found[1] and found[0].item() == pytest.approx(largest, rel=2**-8)
    assert found[2] == 0


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_what_is_no_number_stays_none_and_harms_no_other_token(dtype: torch.dtype) -> None:
    x = torch.ones(2, 2, 4)
    x[0, 0, 1] = float("nan")
    found = kept(x, dtype)
    assert found[0, 0, 1].isnan()
    for other in (found[1], found[:, 1]):
        assert torch.allclose(other, torch.ones(2, 4), atol=2**-8)


def test_a_row_of_zeros_is_one_in_int8() -> None:
    assert not kept(torch.zeros(1, 2, 4), torch.int8).any()


def test_int8_follows_each_token_and_head() -> None:
    """A scale for all would leave nothing of the small ones."""
    x = torch.randn(4, 2, 16, generator=torch.Generator().manual_seed(0))
    x *= torch.logspace(-5, 5, 8).view(4, 2, 1)
    assert ((kept(x, torch.int8) - x).norm(dim=-1) < 0.01 * x.norm(dim=-1)).all()


def test_the_rows_of_int8_pages_are_aligned_and_their_scales_lie_behind_them() -> None:
    cache = torch.zeros(cache_format.pages_shape(2, 16, 3, 64, torch.int8), dtype=torch.int8)
    numbers, scales = cache_format.open_int8(cache, 3, 64)
    numbers.fill_(1)
    assert not scales.any() and numbers.shape == (2, 16, 3, 64) and scales.shape == (2, 3, 16)
    assert numbers.data_ptr() == cache.data_ptr() and numbers.stride(0) % 32 == 0


def test_a_token_takes_half_the_bytes_and_its_scales() -> None:
    plain = KVLayout.of_heads(9, 3, 64, torch.bfloat16)
    taken = {dtype: replace(plain, cache_dtype=dtype).token_bytes for dtype in FORMATS}
    half = plain.token_bytes // 2
    assert taken == dict(zip(FORMATS, (half, half, half + 2 * 3 * 2), strict=True))
