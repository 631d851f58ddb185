"""Calls of flashinfer for NVFP4 (`kernels.fp4`). `module` is flashinfer.

These have not run on a GPU yet. Names and layouts are those of flashinfer 0.7.2
(`flashinfer/gemm/gemm_base.py`, `flashinfer/quantization/fp4_quantization.py`).
"""

from __future__ import annotations

from typing import Any

import torch

from ..fp4 import E4M3, tiled_shape


def quantize(
    module: Any, x: torch.Tensor, factor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.fp4.quantize_fp4`."""
    numbers, scales = module.fp4_quantize(x.contiguous(), factor, is_sf_swizzled_layout=False)
    return numbers.view(torch.uint8), scales.view(E4M3)


def silu_and_mul_quantize(
    module: Any, x: torch.Tensor, factor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return silu(gate) * up of x [T, 2 * I], quantised."""
    numbers, scales = module.silu_and_mul_nvfp4_quantize(
        x.contiguous(), factor, is_sf_swizzled_layout=False
    )
    return numbers.view(torch.uint8), scales.view(E4M3)


def multiply(
    module: Any,
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """See `kernels.fp4.fp4_linear`."""
    tiles = module.block_scale_interleave(x_scales.view(torch.uint8))
    shape = tiled_shape(*x_scales.shape)
    is_one = scale.numel() == 1
    result: torch.Tensor = module.mm_fp4(
        x,
        weight.t(),
        tiles.view(shape),
        weight_scales.view(torch.uint8).t(),
        scale if is_one else None,
        dtype,
        # The backend that all of these GPUs have.
        backend="cutlass",
    )
    if not is_one:
        result = (result * scale).to(dtype)
    return result if bias is None else result + bias
