"""The ops that layers call, in Triton: `piecework::rms_norm` and its like, registered for CUDA.

Signatures and meaning as in `kernels.reference`. They are ops of torch, so that tracing sees one node and no kernel launch.
"""

from __future__ import annotations

import torch

from . import sampling
from .op_kernels import add_rms_norm_kernel, rms_norm_kernel, rotary_kernel, silu_and_mul_kernel

_BLOCK = 1024
"""Elements of a program where a row has more than one."""
_LIBRARY = torch.library.Library("piecework", "FRAGMENT")  # type: ignore[no-untyped-call]


def launch_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, H] or [T, heads, D], rows of any distance: the last dimension normalised, contiguous."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, size = x.numel() // x.shape[-1], x.shape[-1]
    assert x.stride(-1) == 1 and x.dim() in (2, 3)
    inner = x.shape[1] if x.dim() == 3 else 1
    inner_stride = x.stride(1) if x.dim() == 3 else 0
    if rows:
        rms_norm_kernel[(rows,)](
            x, weight, out, x.stride(0), inner_stride, inner, eps, SIZE=size, BLOCK=_power_of_2(size), num_warps=_warps(size)
        )
    return out


def launch_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
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


def launch_silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x [T, 2 * I]."""
    rows, size = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    assert x.stride(1) == 1
    if rows:
        silu_and_mul_kernel[(rows, -(-size // _BLOCK))](x, out, x.stride(0), SIZE=size, BLOCK=_BLOCK, num_warps=4)
    return out


def launch_rotary_embedding(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D]; cos, signed_sin [T, 1, D]."""
    rows, heads, size = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    assert x.stride(2) == cos.stride(2) == signed_sin.stride(2) == 1 and cos.stride(0) == signed_sin.stride(0) and size % 2 == 0
    if rows:
        rotary_kernel[(rows, -(-heads * size // _BLOCK))](
            x, cos, signed_sin, out, x.stride(0), x.stride(1), cos.stride(0), HEADS=heads, HALF=size // 2, BLOCK=_BLOCK, num_warps=4
        )
    return out


def _rms_norm_meta(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x.new_empty(x.shape)


def _add_rms_norm_meta(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _silu_and_mul_meta(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // 2)


def _rotary_embedding_meta(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


for _signature, _launch, _meta in (
    ("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", launch_rms_norm, _rms_norm_meta),
    ("add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)", launch_add_rms_norm, _add_rms_norm_meta),
    ("silu_and_mul(Tensor x) -> Tensor", launch_silu_and_mul, _silu_and_mul_meta),
    ("rotary_embedding(Tensor x, Tensor cos, Tensor signed_sin) -> Tensor", launch_rotary_embedding, _rotary_embedding_meta),
):
    _LIBRARY.define(_signature)  # type: ignore[no-untyped-call]
    _LIBRARY.impl(_signature.partition("(")[0], _launch, "CUDA")  # type: ignore[no-untyped-call]
    _LIBRARY.impl(_signature.partition("(")[0], _meta, "Meta")  # type: ignore[no-untyped-call]

rms_norm = torch.ops.piecework.rms_norm.default
add_rms_norm = torch.ops.piecework.add_rms_norm.default
silu_and_mul = torch.ops.piecework.silu_and_mul.default
rotary_embedding = torch.ops.piecework.rotary_embedding.default
sample_filtered = sampling.sample_filtered
"""No op of torch: what samples is not traced."""


def _power_of_2(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def _warps(size: int) -> int:
    """So that each thread has about eight elements: 16 bytes of bfloat16."""
    return min(16, max(1, _power_of_2(size) // 256))
