"""NVFP4: numbers of 4 bits (e2m1) in groups of 16 columns, with two levels of scales.

A value is number * scale / factor. Each group has an e4m3 scale, and the whole tensor a float32
factor, which is 448 * 6 / (the largest value). Two numbers are in a byte, the earlier column in the
low half. T tokens, K columns, N rows of a weight.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

GROUP = 16
E4M3 = torch.float8_e4m3fn
_LARGEST, _LARGEST_SCALE = 6.0, 448.0
_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Rows and columns of the tiles in which products read scales of weights.
_TILE_ROWS, _TILE_COLUMNS = 128, 4


def quantize_fp4(x: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers [T, K / 2] uint8 and the scales [T, K / 16] e4m3 of x [T, K], with the
    factor [1] float32.

    The largest number of a group becomes 6, up to the rounding of its scale. Numbers are rounded to
    the nearest, ties to even. Values out of range become the largest.
    """
    groups = x.float().reshape(*x.shape[:-1], -1, GROUP)
    largest = groups.abs().amax(-1, keepdim=True) * (1 / _LARGEST)
    scales = (largest * factor).clamp(max=_LARGEST_SCALE).to(E4M3)
    wide = scales.float()
    values = groups * torch.where(wide == 0, wide, factor / wide)
    sizes = values.abs()
    step = torch.where(sizes < 2, 0.5, torch.where(sizes < 4, 1.0, 2.0))
    sizes = ((sizes / step).round() * step).clamp(max=_LARGEST)
    # The codes of 0 to 2 count halves, those of 2 to 4 ones, and 6 is the last.
    codes = torch.where(sizes <= 2, sizes * 2, torch.where(sizes <= 4, sizes + 2, 7.0))
    signed = (codes.to(torch.uint8) | torch.signbit(values).to(torch.uint8) << 3).flatten(-2)
    return signed[..., ::2] | signed[..., 1::2] << 4, scales.squeeze(-1)


def fp4_values(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return number * scale [rows, K] float32 of numbers [rows, K / 2] and scales [rows, K / 16]
    e4m3.
    """
    codes = torch.stack((numbers & 15, numbers >> 4), dim=-1).flatten(-2).int()
    table = torch.tensor(_NUMBERS, device=numbers.device)
    values = table[codes & 7] * (1 - (codes >> 3) * 2)
    groups = values.view(*scales.shape, GROUP)
    return (groups * scales.float().unsqueeze(-1)).flatten(-2)


def fp4_linear(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Multiply x [T, K / 2] by weight [N, K / 2], both numbers of 4 bits, and add bias [N]. Return
    [T, N], summed in float32 and rounded once to `dtype`.

    x_scales is [T, K / 16], weight_scales is `in_tiles` of [N, K / 16]. scale is [1] or [N]
    float32: the inverse of the product of both factors.
    """
    scales = _out_of_tiles(weight_scales, len(weight), x_scales.shape[1])
    result = F.linear(fp4_values(x, x_scales), fp4_values(weight, scales)) * scale
    return (result if bias is None else result + bias.float()).to(dtype)


def tiled_shape(rows: int, groups: int) -> tuple[int, int]:
    """Return the shape of `in_tiles` of [rows, groups]."""
    return -(-rows // _TILE_ROWS) * _TILE_ROWS, -(-groups // _TILE_COLUMNS) * _TILE_COLUMNS


def in_tiles(scales: torch.Tensor) -> torch.Tensor:
    """Return scales [rows, groups] e4m3 in the order in which Blackwell's products read them.

    They are padded with zeros to whole tiles of 128 rows and 4 groups.

    A tile is 512 bytes: those of row r and group g are at 16 (r % 32) + 4 (r / 32) + g.
    """
    rows, groups = scales.shape
    shape = tiled_shape(rows, groups)
    padded = torch.zeros(shape, dtype=torch.uint8, device=scales.device)
    padded[:rows, :groups] = scales.view(torch.uint8)
    tiles = padded.view(shape[0] // _TILE_ROWS, 4, 32, -1, _TILE_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(shape).view(E4M3)


def _out_of_tiles(tiled: torch.Tensor, rows: int, groups: int) -> torch.Tensor:
    """Return scales [rows, groups]: the inverse of `in_tiles`."""
    shape = tiled.shape
    tiles = tiled.view(torch.uint8).view(shape[0] // _TILE_ROWS, -1, 32, 4, _TILE_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(shape)[:rows, :groups].view(E4M3)
