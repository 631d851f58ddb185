"""The reference of quantised ops: what is lost by them is bounded, and products are those of the
numbers that they stand for.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from piecework.kernels import ops, reference
from piecework.kernels.reference import (
    LARGEST,
    block_size,
    quantize_dynamic,
    quantize_static,
    scaled_linear,
    weight_only_linear,
)

QUANTIZED = st.sampled_from(sorted(LARGEST, key=str))
SEEDS = st.integers(0, 2**32 - 1)
STEP = {torch.int8: 0.5 / 127, torch.float8_e4m3fn: 2**-4, torch.float8_e5m2: 2**-3}
"""Half the distance of two neighbours, in parts of the largest number that is kept."""


def random(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


@given(seed=SEEDS, tokens=st.integers(0, 5), groups=st.integers(1, 3), dtype=QUANTIZED)
@settings(deadline=None)
def test_each_group_of_a_row_keeps_its_largest_number(
    seed: int, tokens: int, groups: int, dtype: torch.dtype
) -> None:
    x = random(seed, tokens, groups * 16)
    numbers, scale = quantize_dynamic(x, 16, dtype)
    assert numbers.dtype == dtype and scale.shape == (tokens, groups)
    wide = (numbers.float().unflatten(-1, (groups, 16)) * scale.unsqueeze(-1)).flatten(-2)
    largest = x.float().unflatten(-1, (groups, 16)).abs().amax(-1, keepdim=True)
    error = (wide - x.float()).abs().unflatten(-1, (groups, 16))
    assert (error <= largest * STEP[dtype] * 1.001).all()


@pytest.mark.parametrize("dtype", LARGEST)
def test_what_is_too_large_for_a_static_scale_becomes_the_largest(dtype: torch.dtype) -> None:
    x = torch.tensor([[1e30, -1e30, 0.0]])
    numbers = quantize_static(x, torch.tensor([0.5]), dtype).float()
    assert numbers.tolist() == [[LARGEST[dtype], -LARGEST[dtype], 0.0]]


def test_halves_round_to_even() -> None:
    x = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5]])
    assert quantize_static(x, torch.ones(1), torch.int8).tolist() == [[0, 2, 2, 0, -2]]


@pytest.mark.parametrize("dtype", LARGEST)
def test_a_row_of_zeros_stays_zero(dtype: torch.dtype) -> None:
    numbers, scale = quantize_dynamic(torch.zeros(2, 8), 8, dtype)
    assert (numbers.float() == 0).all() and (scale > 0).all() and scale.isfinite().all()


@given(size=st.integers(1, 700), power=st.integers(0, 9))
def test_the_size_of_a_block_follows_from_their_number(size: int, power: int) -> None:
    blocks = -(-size // 2**power)
    assert block_size(size, blocks) == (2**power if blocks > 1 else size)


@pytest.mark.parametrize("scales", [(1,), (40, 1), (3, 2), (40, 2)])
@pytest.mark.parametrize("groups", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_scaled_product_is_that_of_the_numbers(
    scales: tuple[int, ...], groups: int, dtype: torch.dtype
) -> None:
    x, weight, bias = random(0, 3, 32), random(1, 40, 32).to(dtype), random(2, 40)
    weight_scale = random(3, *scales, dtype=torch.float32).abs()
    if groups:
        numbers, x_scale = quantize_dynamic(x, 32 // groups, dtype)
        wide = numbers.double() * x_scale.double().repeat_interleave(32 // groups, 1)
    else:
        x_scale = torch.tensor([0.25])
        numbers = quantize_static(x, x_scale, dtype)
        wide = numbers.double() * 0.25
    rows = scales[0] if len(scales) == 1 or scales[0] == 40 else 16
    columns = 32 if len(scales) == 1 else 32 // scales[1]
    each = torch.empty(40, 32, dtype=torch.float64)
    for n in range(40):
        for k in range(32):
            place = (0,) if len(scales) == 1 else (n if rows == 40 else n // rows, k // columns)
            each[n, k] = weight_scale[place]
    expected = wide @ (weight.double() * each).T + bias.double()
    got = scaled_linear(numbers, x_scale, weight, weight_scale, bias, torch.float32)
    assert torch.allclose(got.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_weight_of_few_bits_is_widened(bits: int) -> None:
    torch.manual_seed(0)
    numbers = torch.randint(0, 2**bits, (6, 32))
    scale, zero = torch.rand(6, 2), torch.randint(0, 2**bits, (6, 2), dtype=torch.uint8)
    packed = numbers if bits == 8 else numbers[:, ::2] | numbers[:, 1::2] << 4
    wide = (numbers - zero.repeat_interleave(16, 1)) * scale.repeat_interleave(16, 1)
    got = weight_only_linear(torch.eye(32), packed.to(torch.uint8), scale, zero, None, bits)
    assert torch.allclose(got, wide.T)


ARGUMENTS = {
    "norm_rotary_embedding": lambda: (
        random(0, 3, 4, 16),
        random(1, 3, 2, 16),
        random(2, 16),
        random(3, 16),
        1e-5,
        random(4, 3, 1, 16),
        random(5, 3, 1, 16),
    ),
    "quantize_static": lambda: (random(0, 3, 32), torch.ones(1), torch.int8),
    "quantize_dynamic": lambda: (random(0, 3, 32), 16, torch.float8_e4m3fn),
    "scaled_linear": lambda: (
        *quantize_dynamic(random(0, 3, 32), 32, torch.int8),
        torch.ones(8, 32, dtype=torch.int8),
        torch.ones(8, 1),
        None,
        torch.bfloat16,
    ),
    "weight_only_linear": lambda: (
        random(0, 3, 32),
        torch.ones(8, 16, dtype=torch.uint8),
        random(1, 8, 2),
        torch.ones(8, 2, dtype=torch.uint8),
        None,
        4,
    ),
    "rms_norm_quantize_static": lambda: (
        random(0, 3, 32), random(1, 32), 1e-5, torch.ones(1), torch.int8,
    ),
    "rms_norm_quantize_dynamic": lambda: (random(0, 3, 32), random(1, 32), 1e-5, 32, torch.int8),
    "add_rms_norm_quantize_static": lambda: (
        random(0, 3, 32), random(1, 3, 32), random(2, 32), 1e-5, torch.ones(1), torch.int8,
    ),
    "add_rms_norm_quantize_dynamic": lambda: (
        random(0, 3, 32), random(1, 3, 32), random(2, 32), 1e-5, 16, torch.int8,
    ),
    "silu_and_mul_quantize_static": lambda: (random(0, 3, 64), torch.ones(1), torch.int8),
    "silu_and_mul_quantize_dynamic": lambda: (random(0, 3, 64), 16, torch.int8),
    "quantize_fp4": lambda: (random(0, 3, 32), torch.ones(1)),
    "rms_norm_quantize_fp4": lambda: (random(0, 3, 32), random(1, 32), 1e-5, torch.ones(1)),
    "add_rms_norm_quantize_fp4": lambda: (
        random(0, 3, 32), random(1, 3, 32), random(2, 32), 1e-5, torch.ones(1),
    ),
    "silu_and_mul_quantize_fp4": lambda: (random(0, 3, 64), torch.ones(1)),
    "fp4_linear": lambda: (
        *reference.quantize_fp4(random(0, 3, 32), torch.ones(1)),
        torch.ones(8, 16, dtype=torch.uint8),
        torch.ones(128, 4).to(torch.float8_e4m3fn),
        torch.ones(1),
        None,
        torch.bfloat16,
    ),
    "choose_experts": lambda: (random(0, 3, 8), None, 2, True, True, 4, 2, 1, 2.0, 1e-20),
}  # fmt: skip


@pytest.mark.parametrize("op", ARGUMENTS)
def test_the_traced_op_gives_what_its_reference_does_in_the_form_that_it_promises(op: str) -> None:
    arguments = ARGUMENTS[op]()
    expected = getattr(reference, op)(*arguments)
    overload = getattr(torch.ops.piecework, op).default
    got = overload(*arguments)
    on_meta = overload(*(a.to("meta") if isinstance(a, torch.Tensor) else a for a in arguments))
    if isinstance(expected, torch.Tensor):
        expected, got, on_meta = (expected,), (got,), (on_meta,)
    assert len(expected) == len(got) == len(on_meta)
    for one, two, three in zip(expected, got, on_meta, strict=True):
        assert torch.equal(one, two)
        assert (one.shape, one.stride(), one.dtype) == (three.shape, three.stride(), three.dtype)


def test_every_traced_op_is_tried() -> None:
    elsewhere = {"rms_norm", "add_rms_norm", "silu_and_mul", "rotary_embedding", "fused_moe"}
    elsewhere |= {"lora"}  # tests/kernels/test_lora.py
    assert set(ARGUMENTS) | elsewhere == set(ops.TRACED)
