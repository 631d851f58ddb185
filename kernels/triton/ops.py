"""The ops that layers call, in Triton. Signatures and meaning are those of `kernels.reference`."""

from __future__ import annotations

import torch

from .linear import scaled_linear, weight_only_linear
from .lora import lora
from .moe import choose_experts, fused_moe
from .op_kernels import (
    add_rms_norm_kernel,
    norm_rotary_kernel,
    rms_norm_kernel,
    rotary_kernel,
    silu_and_mul_kernel,
)
from .quantize import (
    add_rms_norm_quantize_dynamic,
    add_rms_norm_quantize_static,
    quantize_dynamic,
    quantize_static,
    rms_norm_quantize_dynamic,
    rms_norm_quantize_static,
    silu_and_mul_quantize_dynamic,
    silu_and_mul_quantize_static,
)
from .recurrent import conv_step, gated_delta_step, mamba2_step
from .sampling import sample_filtered
from .tiles import BLOCK, power_of_2, warps

__all__ = [
    "add_rms_norm",
    "add_rms_norm_quantize_dynamic",
    "add_rms_norm_quantize_static",
    "choose_experts",
    "conv_step",
    "fused_moe",
    "gated_delta_step",
    "lora",
    "mamba2_step",
    "norm_rotary_embedding",
    "quantize_dynamic",
    "quantize_static",
    "rms_norm",
    "rms_norm_quantize_dynamic",
    "rms_norm_quantize_static",
    "rotary_embedding",
    "sample_filtered",
    "scaled_linear",
    "silu_and_mul",
    "silu_and_mul_quantize_dynamic",
    "silu_and_mul_quantize_static",
    "weight_only_linear",
]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last dimension of x [T, H] or [T, heads, D], rows of any stride. The result is
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
            BLOCK=power_of_2(size),
            num_warps=warps(size),
        )
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add and normalise x, residual [T, H]."""
    out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    assert x.stride(-1) == residual.stride(-1) == 1 and x.dim() == 2
    rows, size = x.shape
    if rows:
        add_rms_norm_kernel[(rows,)](
            x, residual, weight, out, total, x.stride(0), residual.stride(0), eps,
            SIZE=size, BLOCK=power_of_2(size), num_warps=warps(size),
        )  # fmt: skip
    return out, total


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Compute silu and mul of x [T, 2 * I]."""
    rows, size = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    assert x.stride(1) == 1
    if rows:
        silu_and_mul_kernel[(rows, -(-size // BLOCK))](
            x, out, x.stride(0), SIZE=size, BLOCK=BLOCK, num_warps=4
        )
    return out


def rotary_embedding(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [T, heads, D] by cos, signed_sin [T, 1, D]."""
    rows, heads, size = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    assert (
        x.stride(2) == cos.stride(2) == signed_sin.stride(2) == 1
        and cos.stride(0) == signed_sin.stride(0)
        and size % 2 == 0
    )
    if rows:
        rotary_kernel[(rows, -(-heads * size // BLOCK))](
            x,
            cos,
            signed_sin,
            out,
            x.stride(0),
            x.stride(1),
            cos.stride(0),
            HEADS=heads,
            HALF=size // 2,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return out


def norm_rotary_embedding(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
) -> torch.Tensor:
    """Normalise and rotate q [T, heads, D] and k [T, kv heads, D] by cos, signed_sin [T, 1, D]."""
    rows, heads, size = q.shape
    kv_heads, block = k.shape[1], power_of_2(size // 2)
    out = torch.empty(rows, heads + kv_heads, size, dtype=q.dtype, device=q.device)
    assert (
        q.stride(2) == k.stride(2) == cos.stride(2) == signed_sin.stride(2) == 1
        and cos.stride(0) == signed_sin.stride(0)
        and size % 2 == 0
    )
    at_once = max(1, BLOCK // (2 * block))
    if rows:
        norm_rotary_kernel[(rows, -(-(heads + kv_heads) // at_once))](
            q,
            k,
            q_weight,
            k_weight,
            cos,
            signed_sin,
            out,
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            cos.stride(0),
            eps,
            HEADS=heads,
            KV_HEADS=kv_heads,
            HALF=size // 2,
            ROWS=at_once,
            BLOCK=block,
            num_warps=4,
        )
    return out
