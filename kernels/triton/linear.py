"""Products with quantised weights in Triton. Signatures and meaning are those of
`kernels.reference`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .. import reference
from . import device as devices
from .linear_kernels import scaled_linear_kernel, weight_only_linear_kernel
from .quantize import BITS

_LEAST_BLOCK_K = {8: 32, 16: 16}  # Columns per matrix instruction, by the bits of the factors.


class _Tiles(NamedTuple):
    """Tile sizes of a product, and how many tiles are loaded ahead."""

    tokens: int
    columns: int
    deep: int
    num_warps: int
    num_stages: int

    def grid(self, tokens: int, columns: int) -> tuple[int]:
        return (-(-tokens // self.tokens) * -(-columns // self.columns),)


def _scaled_tiles(tokens: int, widened: bool) -> _Tiles:
    """For few tokens, use many narrow programs, which load much of the weight ahead. For many
    tokens, use tiles so large that each number is used 128 times.
    """
    if tokens <= 16:
        return _Tiles(16, 32, 128, 4, 6)
    if tokens <= 64:
        return _Tiles(64, 64, 128, 4, 4)
    return _Tiles(128, 128, 64, 8, 4) if widened else _Tiles(128, 128, 128, 8, 3)


def _weight_only_tiles(tokens: int) -> _Tiles:
    if tokens <= 16:
        # Four warps would widen each weight twice.
        return _Tiles(16, 32, 128, 2, 6)
    if tokens <= 64:
        return _Tiles(64, 64, 64, 4, 4)
    return _Tiles(128, 128, 64, 8, 3)


def _largest_power(number: int) -> int:
    """Return the largest power of 2 that divides a number."""
    return number & -number


# Devices on which FP8 had to be widened to float16 for products.
widening: set[torch.device] = set()


def _widens(x: torch.Tensor) -> bool:
    """Return whether x is FP8 on a GPU without matrix instructions for it."""
    if x.dtype == torch.int8 or _multiplies_fp8(x.device):
        return False
    widening.add(x.device)
    return True


def _multiplies_fp8(device: torch.device) -> bool:
    """True from compute capability 8.9."""
    return devices.properties(device).capability >= (8, 9)


def scaled_linear(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Multiply x [T, K] by weight [N, K], with rows of any stride. If a scale's group is not a
    multiple of 32 columns, use plain torch.
    """
    (tokens, size), columns = x.shape, weight.shape[0]
    by_row = x_scale.dim() == 2
    groups = x_scale.shape[1] if by_row else 1
    blocks = weight_scale.shape if weight_scale.dim() == 2 else (1, 1)
    x_group = size // groups
    weight_rows, weight_columns = (
        reference.block_size(number, count)
        for number, count in zip(weight.shape, blocks, strict=True)
    )
    widened = _widens(x)
    tiles = _scaled_tiles(tokens, widened)
    per_block = groups > 1 or blocks[1] > 1
    deep = tiles.deep
    if per_block:
        among = [
            one for one, count in ((x_group, groups), (weight_columns, blocks[1])) if count > 1
        ]
        deep = min(deep, *map(_largest_power, among))
    if deep < _LEAST_BLOCK_K[8] or x.is_floating_point() != weight.is_floating_point():
        return reference.scaled_linear(x, x_scale, weight, weight_scale, bias, dtype)
    assert x.stride(1) == weight.stride(1) == 1
    out = torch.empty(tokens, columns, dtype=dtype, device=x.device)
    if tokens:
        scaled_linear_kernel[tiles.grid(tokens, columns)](
            x.view(torch.uint8) if widened else x,
            x_scale,
            weight.view(torch.uint8) if widened else weight,
            weight_scale,
            out if bias is None else bias,
            out,
            tokens,
            columns,
            size,
            x.stride(0),
            weight.stride(0),
            x_scale.stride(0) if by_row else 0,
            weight_scale.stride(0) if weight_scale.dim() == 2 else 0,
            x_group,
            weight_rows,
            weight_columns,
            PER_BLOCK=per_block,
            X_MANTISSA=BITS[x.dtype][0] if widened else 0,
            WEIGHT_MANTISSA=BITS[weight.dtype][0] if widened else 0,
            HAS_BIAS=bias is not None,
            WHOLE=size % deep == 0,
            BLOCK_M=tiles.tokens,
            BLOCK_N=tiles.columns,
            BLOCK_K=deep,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
    return out


def weight_only_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    bias: torch.Tensor | None,
    bits: int,
) -> torch.Tensor:
    """Multiply x [T, K], with rows of any stride. If a group is not a multiple of 16 columns, use
    plain torch.
    """
    (tokens, size), columns, groups = x.shape, weight.shape[0], scale.shape[1]
    tiles = _weight_only_tiles(tokens)
    deep = tiles.deep
    if x.dtype == torch.float32:
        # Numbers have twice as many bytes.
        deep = min(deep, 32)
    if groups > 1:
        deep = min(deep, _largest_power(size // groups))
    if deep < _LEAST_BLOCK_K[16]:
        return reference.weight_only_linear(x, weight, scale, zero, bias, bits)
    assert x.stride(1) == weight.stride(1) == scale.stride(1) == zero.stride(1) == 1
    assert scale.stride(0) == zero.stride(0)
    out = torch.empty(tokens, columns, dtype=x.dtype, device=x.device)
    if tokens:
        weight_only_linear_kernel[tiles.grid(tokens, columns)](
            x,
            weight,
            scale,
            zero,
            out if bias is None else bias,
            out,
            tokens,
            columns,
            size,
            x.stride(0),
            weight.stride(0),
            scale.stride(0),
            BITS=bits,
            PER_GROUP=size // groups // deep if groups > 1 else 0,
            NATIVE=x.element_size() == 2 and devices.properties(x.device).capability >= (8, 0),
            HAS_BIAS=bias is not None,
            WHOLE=size % deep == 0,
            BLOCK_M=tiles.tokens,
            BLOCK_N=tiles.columns,
            BLOCK_K=deep,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
    return out
