"""NVFP4's two-level quantiser and its product, against numbers that are searched for one by one."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

from piecework.kernels import fp4, reference

E4M3 = torch.float8_e4m3fn
SIZES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def nearest(values: torch.Tensor) -> torch.Tensor:
    """Of each float64 value, the nearest number of e2m1, of two the one with an even code."""
    off = (values.abs().unsqueeze(-1) - SIZES).abs()
    # An even code is nearer by nothing that a float32 distance has.
    code = (off + torch.tensor([0, 1] * 4) * 1e-12).argmin(-1)
    return SIZES[code] * torch.where(values < 0, -1, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_group_is_divided_by_its_scale_and_rounded_to_the_nearest(dtype: torch.dtype) -> None:
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[2] *= 100
    x[3, 16:32] = 0
    x[4] *= 1e-3
    factor = 448 * 6 / x[:2].float().abs().max().view(1)
    numbers, scales = fp4.quantize_fp4(x, factor)
    assert numbers.shape == (7, 32) and scales.shape == (7, 4) and scales.dtype == E4M3
    groups = x.double().view(7, 4, 16)
    wanted = groups.abs().amax(-1).float() * (1 / 6) * factor
    # Row 2 has more than the factor allows: its scales are the largest that there is.
    assert torch.equal(scales, wanted.clamp(max=448).to(E4M3))
    by = torch.where(scales.float() == 0, 0, factor / scales.float())
    found = unpack_fp4_from_uint8(numbers, 7, 64, dtype=torch.float32)
    exact = nearest((groups.float() * by.unsqueeze(-1)).double()).flatten(1)
    assert torch.equal(found.double(), exact)
    assert (found[3, 16:32] == 0).all() and (found[2].abs() == 6).any()
    values = fp4.fp4_values(numbers, scales)
    assert torch.equal(values, found * scales.float().repeat_interleave(16, 1))


def test_ties_are_rounded_to_even_codes() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    x = torch.cat((ties, -ties)).view(1, 16)
    # The scale is 1.
    numbers, scales = fp4.quantize_fp4(x, torch.ones(1))
    found = unpack_fp4_from_uint8(numbers, 1, 16, dtype=torch.float32)
    assert scales.item() == 1.0
    assert found[0, :8].tolist() == [0, 1, 1, 2, 2, 4, 4, 6]
    assert torch.equal(found[0, 8:], -found[0, :8])


@pytest.mark.parametrize(("rows", "groups"), [(1, 1), (128, 4), (130, 9), (300, 8)])
def test_tiles_have_each_scale_where_products_read_it(rows: int, groups: int) -> None:
    scales = torch.randint(1, 120, (rows, groups), dtype=torch.uint8).view(E4M3)
    tiled = fp4.in_tiles(scales)
    assert tiled.shape == fp4.tiled_shape(rows, groups)
    flat, across = tiled.view(torch.uint8).flatten(), tiled.shape[1] // 4
    for row in {0, rows // 2, rows - 1}:
        for group in range(groups):
            tile = row // 128 * across + group // 4
            place = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + group % 4
            assert flat[place] == scales.view(torch.uint8)[row, group]
    assert int((flat != 0).sum()) == rows * groups


@pytest.mark.parametrize("count", [1, 40])
def test_the_product_is_that_of_the_values(count: int) -> None:
    make = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(rows, 96, generator=make) for rows in (5, 40))
    bias = torch.randn(40, generator=make).bfloat16()
    factors = torch.rand(2, 1, generator=make) * 500 + 100
    (numbers, scales), (weights, weight_scales) = map(fp4.quantize_fp4, (x, weight), factors)
    rows = torch.rand(count, generator=make) + 0.5
    scale = rows / factors.prod()
    found = reference.fp4_linear(
        numbers, scales, weights, fp4.in_tiles(weight_scales), scale, bias, torch.float32
    )
    values = [
        fp4.fp4_values(*each) / factor
        for each, factor in zip(((numbers, scales), (weights, weight_scales)), factors, strict=True)
    ]
    torch.testing.assert_close(found, values[0] @ values[1].T * rows + bias.float())
    # 4 bits lose a tenth.
    exact = x @ weight.T * rows + bias.float()
    assert (found - exact).norm() < 0.2 * exact.norm()
