"""Weights of few bits are unpacked to the numbers that their writers packed."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_layouts import write_awq, write_gptq

from piecework.kernels import ops
from piecework.runtime.quantization import awq, gptq, pack_quantized
from piecework.runtime.quantization.grouped_weight import (
    GroupedWeight,
    check_scale,
    gguf_blocks,
    gguf_kind,
)

SEEDS = st.integers(0, 2**32 - 1)
BITS = st.sampled_from([4, 8])


def random_weight(
    seed: int, bits: int, rows: int, groups: int, columns: int, *, symmetric: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers [N, K], scale and zero [N, groups] of `columns` columns."""
    random = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 2**bits, (rows, groups * columns), generator=random)
    scale = torch.rand(rows, groups, generator=random) * 0.1 + 0.001
    zero = torch.randint(0, 2**bits, (rows, groups), generator=random)
    return numbers, scale.half(), zero.fill_(2 ** (bits - 1)) if symmetric else zero


def value(
    numbers: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, group_of: torch.Tensor
) -> torch.Tensor:
    """[N, K] float32."""
    return (numbers - zero[:, group_of]).float() * scale.float()[:, group_of]


def unpacked_value(weight: GroupedWeight, in_features: int, bits: int) -> torch.Tensor:
    """What the op multiplies an input's columns by, whose order it is brought into."""
    x = torch.eye(in_features)
    x = x if weight.order is None else x[:, weight.order]
    return ops.weight_only_linear(x, weight.numbers, weight.scale, weight.zero, None, bits).T


def in_turn(groups: int, columns: int) -> torch.Tensor:
    return torch.arange(groups * columns) // columns


@given(seed=SEEDS, rows=st.integers(1, 4), groups=st.integers(1, 3), columns=st.integers(1, 8))
@settings(deadline=None)
def test_awq_is_unpacked(seed: int, rows: int, groups: int, columns: int) -> None:
    numbers, scale, zero = random_weight(seed, 4, rows * 8, groups, columns * 2)
    weight = awq.unpack(**write_awq(numbers, scale, zero))
    expected = value(numbers, scale, zero, in_turn(groups, columns * 2))
    assert torch.equal(unpacked_value(weight, numbers.shape[1], 4), expected)


@given(
    seed=SEEDS, bits=BITS, version=st.sampled_from([1, 2]), groups=st.integers(1, 3),
    act_order=st.booleans(),
)  # fmt: skip
@settings(deadline=None)
def test_gptq_is_unpacked(seed: int, bits: int, version: int, groups: int, act_order: bool) -> None:
    numbers, scale, zero = random_weight(seed, bits, 16, groups, 16)
    group_of = in_turn(groups, 16)
    if act_order:
        group_of = group_of[torch.randperm(len(group_of))]
    tensors = write_gptq(numbers, scale, zero, bits, g_idx=group_of, version=version)
    weight = gptq.unpack(**tensors, bits=bits, zeros_less_one=version == 1)
    expected = value(numbers, scale, zero, group_of)
    assert torch.equal(unpacked_value(weight, numbers.shape[1], bits), expected)


@given(
    seed=SEEDS, bits=BITS, rows=st.integers(1, 9), groups=st.integers(1, 3),
    columns=st.integers(1, 12), symmetric=st.booleans(), act_order=st.booleans(),
)  # fmt: skip
@settings(deadline=None)
def test_pack_quantized_is_unpacked(
    seed: int, bits: int, rows: int, groups: int, columns: int, symmetric: bool, act_order: bool
) -> None:
    """As the library packs it, which fills up the last word of each row and column."""
    columns *= 2
    numbers, scale, zero = random_weight(seed, bits, rows, groups, columns, symmetric=symmetric)
    group_of = in_turn(groups, columns)
    if act_order:
        group_of = group_of[torch.randperm(len(group_of))]
    half = 2 ** (bits - 1)
    weight = pack_quantized.unpack(
        pack_to_int32((numbers - half).to(torch.int8), bits),
        scale,
        None if symmetric else pack_to_int32((zero - half).to(torch.int8), bits, packed_dim=0),
        group_of.int() if act_order else None,
        in_features=numbers.shape[1],
        bits=bits,
    )
    expected = value(numbers, scale, zero, group_of)
    assert torch.equal(unpacked_value(weight, numbers.shape[1], bits), expected)


@pytest.mark.parametrize(
    ("fault", "said"), [(-1, "names groups"), (4, "names groups"), (0, "32 columns")]
)
def test_a_broken_group_index_is_refused(fault: int, said: str) -> None:
    tensors = write_gptq(*random_weight(0, 4, 8, 4, 32))
    tensors["g_idx"][40] = fault
    with pytest.raises(ValueError, match=said):
        gptq.unpack(**tensors, bits=4, zeros_less_one=True)


@given(seed=SEEDS, bits=BITS, groups=st.integers(1, 3), blocks=st.integers(1, 4))
@settings(deadline=None)
def test_blocks_of_gguf_hold_the_same_weight(
    seed: int, bits: int, groups: int, blocks: int
) -> None:
    """Up to the float16 that the least value of a block is rounded to."""
    symmetric = bits == 8
    numbers, scale, zero = random_weight(seed, bits, 8, groups, blocks * 32, symmetric=symmetric)
    weight = gptq.unpack(**write_gptq(numbers, scale, zero, bits), bits=bits, zeros_less_one=True)
    kind = gguf_kind(bits, blocks * 32, symmetric=symmetric)
    assert kind is not None
    stored = dequantize(gguf_blocks(weight, kind).numpy(), GGMLQuantizationType[kind])
    expected = value(numbers, scale, zero, in_turn(groups, blocks * 32))
    allowed = 0 if symmetric else 15 * scale.float().max() * 2.0**-11
    assert (torch.from_numpy(stored) - expected).abs().max() <= allowed


def test_symmetric_blocks_of_four_bits_lose_nothing() -> None:
    numbers, scale, zero = random_weight(0, 4, 8, 2, 64, symmetric=True)
    weight = awq.unpack(**write_awq(numbers, scale, zero))
    stored = dequantize(gguf_blocks(weight, "Q4_1").numpy(), GGMLQuantizationType.Q4_1)
    assert torch.equal(torch.from_numpy(stored), value(numbers, scale, zero, in_turn(2, 64)))


def test_what_blocks_of_gguf_cannot_hold_is_known() -> None:
    assert gguf_kind(4, 48, symmetric=True) is None
    assert gguf_kind(8, 64, symmetric=False) is None


@pytest.mark.parametrize("fault", [float("nan"), float("inf"), 0.0, 1e5])
def test_scales_that_no_quantiser_writes_are_refused(fault: float) -> None:
    scale = torch.ones(3, 2)
    check_scale(scale)
    scale[1, 1] = fault
    with pytest.raises(ValueError, match="holds"):
        check_scale(scale)
