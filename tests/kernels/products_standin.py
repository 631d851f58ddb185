"""Products of sgl-kernel and torch in plain torch, as strict as their kernels.

What sgl-kernel refuses: the checks of its sources (sgl-kernel/csrc/gemm/*.cu, 0.3.21). Its tiles
lie at steps of K and N whatever the strides are, so matrices with gaps are an error here. What
torch refuses: its own checks for CUDA devices, asked on tensors without memory, and those that it
makes in C++ (aten/src/ATen/native/cuda/ScaledBlas.cpp).
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from piecework.kernels import reference

_HALVES = (torch.bfloat16, torch.float16)


def multiply_rows(
    dtype: torch.dtype,
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    scales_a: torch.Tensor,
    scales_b: torch.Tensor,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """sgl-kernel's `fp8_scaled_mm` and `int8_scaled_mm`."""
    _check_matrices(dtype, mat_a, mat_b, out_dtype)
    for scales, count in ((scales_a, mat_a.shape[0]), (scales_b, mat_b.shape[1])):
        assert scales.numel() == count and scales.is_contiguous()
        assert scales.dtype == torch.float32
    if bias is not None:
        assert bias.numel() == mat_b.shape[1] and bias.is_contiguous() and bias.dtype == out_dtype
    x_scale, weight_scale = scales_a.reshape(-1, 1), scales_b.reshape(-1, 1)
    return reference.scaled_linear(mat_a, x_scale, mat_b.t(), weight_scale, bias, out_dtype)


def multiply_blocks(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    scales_a: torch.Tensor,
    scales_b: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """sgl-kernel's `fp8_blockwise_scaled_mm`."""
    _check_matrices(torch.float8_e4m3fn, mat_a, mat_b, out_dtype)
    (rows, size), columns = mat_a.shape, mat_b.shape[1]
    assert size % 128 == columns % 128 == 0
    assert scales_a.shape == (rows, size // 128) and scales_b.shape == (size // 128, columns // 128)
    assert scales_a.dtype == scales_b.dtype == torch.float32
    assert all(_by_columns(scales) for scales in (scales_a, scales_b))
    weight_scale = scales_b.t()
    return reference.scaled_linear(mat_a, scales_a, mat_b.t(), weight_scale, None, out_dtype)


def _check_matrices(
    dtype: torch.dtype, mat_a: torch.Tensor, mat_b: torch.Tensor, out_dtype: torch.dtype
) -> None:
    assert mat_a.dtype == mat_b.dtype == dtype and out_dtype in _HALVES
    assert mat_a.shape[1] == mat_b.shape[0] and mat_a.shape[1] % 16 == 0
    assert mat_b.shape[1] % 8 == 0 and mat_a.shape[0] > 0
    assert mat_a.is_contiguous() and mat_b.t().is_contiguous()
    assert mat_a.data_ptr() % 16 == mat_b.data_ptr() % 16 == 0


def _by_columns(scales: torch.Tensor) -> bool:
    return scales.stride(0) == 1 or (scales.is_contiguous() and min(scales.shape) == 1)


def scaled_mm(
    mat1: torch.Tensor,
    mat2: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """`torch._scaled_mm` on a GPU of capability 9.0."""
    in_blocks = scale_a.dim() == 2 and scale_a.shape[1] > 1
    assert scale_result is None and use_fast_accum != in_blocks
    with FakeTensorMode():
        given = [_on_cuda(tensor) for tensor in (mat1, mat2, scale_a, scale_b)]
        torch._scaled_mm(*given, out_dtype=out_dtype, use_fast_accum=use_fast_accum)
    assert mat1.data_ptr() % 16 == mat2.data_ptr() % 16 == 0
    assert torch.float8_e4m3fn in (mat1.dtype, mat2.dtype) and out_dtype in _HALVES
    assert bias is None or (bias.dtype == out_dtype and bias.numel() == mat2.shape[1])
    weight_scale = scale_b.t() if scale_b.dim() == 2 else scale_b
    if in_blocks:
        assert scale_a.stride() == (1, len(scale_a)) or len(scale_a) == 1
        assert weight_scale.is_contiguous() and weight_scale.shape[1] % 4 == 0
    return reference.scaled_linear(mat1, scale_a, mat2.t(), weight_scale, bias, out_dtype)


def _on_cuda(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")
