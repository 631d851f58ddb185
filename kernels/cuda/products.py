"""Products of 8-bit numbers by the CUDA kernels of torch and sgl-kernel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

_HALVES = (torch.bfloat16, torch.float16)
_BLOCK = 128
_HAS_FP8 = (8, 9)
# The only capability with block scales. cuBLAS has them for 9.0 alone, and sgl-kernel's kernels for
# 10.0 allocate memory, which a graph cannot capture.
_HAS_BLOCKS = (9, 0)
_VECTOR_BYTES = 16


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability (major, minor) of a CUDA device, or (0, 0) for other devices."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


@dataclass(frozen=True, slots=True)
class ScaledProduct:
    """A call of `ops.scaled_linear` in the form that libraries support.

    x is [T, K] and weight [N, K], both e4m3 or both int8, contiguous, in vectors of 16 bytes. bias
    [N] has the 16-bit `dtype`. `form` tells what has a scale: "tensor" (each tensor), "rows" (of x
    and of the weight), or "blocks" (128 numbers of x, 128 x 128 of the weight).
    """

    x: torch.Tensor
    x_scale: torch.Tensor
    weight: torch.Tensor
    weight_scale: torch.Tensor
    bias: torch.Tensor | None
    dtype: torch.dtype
    form: str

    @property
    def is_fp8(self) -> bool:
        return self.x.dtype == torch.float8_e4m3fn

    def row_scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return contiguous scales [T, 1] and [N, 1]."""
        tokens, columns = len(self.x), len(self.weight)
        x_scale = self.x_scale.reshape(-1, 1).expand(tokens, 1).contiguous()
        return x_scale, self.weight_scale.reshape(-1, 1).expand(columns, 1).contiguous()

    def block_scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scales [T, K / 128] and [K / 128, N / 128] with contiguous columns."""
        return self.x_scale.t().contiguous().t(), self.weight_scale.t()


def scaled_product(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> ScaledProduct | None:
    """Return the call, or None if no library supports it."""
    form = form_of(x_scale, weight, weight_scale)
    tensors = (x, weight) if bias is None else (x, weight, bias)
    fits = (
        form is not None
        and x.dtype == weight.dtype
        and x.dtype in (torch.int8, torch.float8_e4m3fn)
        and dtype in _HALVES
        and (bias is None or bias.dtype == dtype)
        and len(x) > 0
        and x.shape[1] % _VECTOR_BYTES == 0
        and len(weight) * dtype.itemsize % _VECTOR_BYTES == 0
        and all(one.is_contiguous() and one.data_ptr() % _VECTOR_BYTES == 0 for one in tensors)
    )
    if form is None or not fits:
        return None
    return ScaledProduct(x, x_scale, weight, weight_scale, bias, dtype, form)


def form_of(x_scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor) -> str | None:
    """Return what has a scale (`ScaledProduct.form`), or None for a form of no library."""
    columns, size = weight.shape
    if x_scale.shape[1:].numel() == weight_scale.shape[1:].numel() == 1:
        if len(weight_scale) not in (1, columns):
            return None
        return "tensor" if x_scale.dim() == 1 and len(weight_scale) == 1 else "rows"
    if columns % _BLOCK or size % _BLOCK:
        return None
    blocks = (columns // _BLOCK, size // _BLOCK)
    return "blocks" if weight_scale.shape == blocks and x_scale.shape[1] == blocks[1] else None


def takes_by_sgl_kernel(product: ScaledProduct) -> bool:
    """Return whether sgl-kernel has a kernel for it: FP8 from 8.9, blocks on 9.0 without a bias,
    int8 up to 9.0.
    """
    has = capability(product.x.device)
    if product.form == "blocks":
        return product.is_fp8 and product.bias is None and has == _HAS_BLOCKS
    return has >= _HAS_FP8 if product.is_fp8 else has <= _HAS_BLOCKS


def multiply_by_sgl_kernel(module: Any, product: ScaledProduct) -> torch.Tensor:
    """Multiply by sgl-kernel's `fp8_scaled_mm`, `int8_scaled_mm` or `fp8_blockwise_scaled_mm`. Its
    second matrix is [K, N] in columns, which is the weight as stored.
    """
    matrices = (product.x, product.weight.t())
    if product.form == "blocks":
        result: torch.Tensor = module.fp8_blockwise_scaled_mm(
            *matrices, *product.block_scales(), product.dtype
        )
        return result
    multiply = module.fp8_scaled_mm if product.is_fp8 else module.int8_scaled_mm
    result = multiply(*matrices, *product.row_scales(), product.dtype, product.bias)
    return result


@dataclass(frozen=True, slots=True)
class TorchProducts:
    """Products by `torch._scaled_mm`: cuBLAS, or CUTLASS if cuBLAS has no kernel.

    FP8 needs 8.9. Block scales need 9.0 and columns of a multiple of 16 bytes. `multiply` is
    torch's function.
    """

    multiply: Any = torch._scaled_mm
    name: str = "torch._scaled_mm"

    def takes(self, op: str, *given: Any) -> bool:
        return op == "scaled_linear" and self._product(*given) is not None

    def scaled_linear(self, *given: Any) -> torch.Tensor | None:
        """Multiply. Arguments as in `reference.scaled_linear`."""
        product = self._product(*given)
        if product is None:
            return None
        if product.form == "tensor":
            scales = (product.x_scale, product.weight_scale)
        elif product.form == "rows":
            x_scale, weight_scale = product.row_scales()
            scales = (x_scale, weight_scale.t())
        else:
            scales = product.block_scales()
        result: torch.Tensor = self.multiply(
            product.x,
            product.weight.t(),
            *scales,
            bias=product.bias,
            out_dtype=product.dtype,
            # Sums of 14 bits, as in sgl-kernel's products. Kernels for blocks add up outside.
            use_fast_accum=product.form != "blocks",
        )
        return result

    def _product(self, *given: Any) -> ScaledProduct | None:
        product = scaled_product(*given)
        if product is None or not product.is_fp8 or len(product.weight) % 16:
            return None
        has = capability(product.x.device)
        if product.form == "blocks":
            return product if has == _HAS_BLOCKS and product.x_scale.shape[1] % 4 == 0 else None
        return product if has >= _HAS_FP8 else None
