"""The ops that layers call, in Triton: signatures and meaning as in `kernels.reference`."""

from __future__ import annotations

import torch

from .op_kernels import add_rms_norm_kernel, rms_norm_kernel, rotary_kernel, silu_and_mul_kernel
from .sampling import sample_filtered

__all__ = ["add_rms_norm", "rms_norm", "rotary_embedding", "sample_filtered", "silu_and_mul"]

_BLOCK = 1024
"""Elements of a program where a row has more than one."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, H] or [T, heads, D], rows of any distance: the last dimension normalised,
    contiguous.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, size = x.numel() // x.shape[-1], x.shape[-1]
    assert x.stride(-1) == 1 and x.dim() in (2, 3)
    inner = x.shape[1] if x.dim() == 3 else 1
    inner_stride = x.stride(1) if x.dim() == 3 else 0
    if rows:
        rms_norm_kernel[(rows,)](
            x,
            weight,
            out,
            x.stride(0),
            inner_stride,
            inner,
            eps,
            SIZE=size,
            BLOCK=_power_of_2(size),
            num_warps=_warps(size),
        )
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual [T, H]."""
    out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    assert x.stride(-1) == residual.stride(-1) == 1 and x.dim() == 2
    rows, size = x.shape
    if rows:
        add_rms_norm_kernel[(rows,)](
            x, residual, weight, out, total, x.stride(0), residual.stride(0), eps,
            SIZE=size, BLOCK=_power_of_2(size), num_warps=_warps(size),
        )  # fmt: skip
    return out, total


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x [T, 2 * I]."""
    rows, size = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    assert x.stride(1) == 1
    if rows:
        silu_and_mul_kernel[(rows, -(-size // _BLOCK))](
            x, out, x.stride(0), SIZE=size, BLOCK=_BLOCK, num_warps=4
        )
    return out


def rotary_embedding(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D]; cos, signed_sin [T, 1, D]."""
    rows, heads, size = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    assert (
        x.stride(2) == cos.stride(2) == signed_sin.stride(2) == 1
        and cos.stride(0) == signed_sin.stride(0)
        and size % 2 == 0
    )
    if rows:
        rotary_kernel[(rows, -(-heads * size // _BLOCK))](
            x,
            cos,
            signed_sin,
            out,
            x.stride(0),
            x.stride(1),
            cos.stride(0),
            HEADS=heads,
            HALF=size // 2,
            BLOCK=_BLOCK,
            num_warps=4,
        )
    return out


def _power_of_2(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def _warps(size: int) -> int:
    """So that each thread has about eight elements: 16 bytes of bfloat16."""
    return min(16, max(1, _power_of_2(size) // 256))
