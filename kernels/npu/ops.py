"""The ops that layers call on Ascend NPUs, such as `piecework::rms_norm`: torch_npu's kernel if it
supports the call, otherwise plain torch.

Signatures and meaning are those of `kernels.reference`. Kernels round once, where the reference
also rounds to 16 bits in between. For the kernels' limits see the op documentation of torch_npu
2.13 (`_op_plugin_docs.py`) and of the aclnn functions below them (CANN's ops-nn).
"""

from __future__ import annotations

import torch

from .. import reference
from ..ops import TRACED
from .gated_delta import gated_delta_step
from .moe import fused_moe
from .quantized_ops import quantize_dynamic, quantize_static, scaled_linear
from .refusals import or_else
from .sampling import UNIFORM_DTYPE, sample_filtered

__all__ = [
    "UNIFORM_DTYPE",
    "add_rms_norm",
    "add_rms_norm_quantize_dynamic",
    "add_rms_norm_quantize_static",
    "fused_moe",
    "gated_delta_step",
    "norm_rotary_embedding",
    "quantize_dynamic",
    "quantize_static",
    "rms_norm",
    "rotary_embedding",
    "sample_filtered",
    "scaled_linear",
    "silu_and_mul",
    "silu_and_mul_quantize_static",
]

_LIBRARY = torch.library.Library("piecework", "FRAGMENT")  # type: ignore[no-untyped-call]
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_HALVES = (torch.bfloat16, torch.float16)
_WIDEST_HEAD, _MOST_HEADS = 894, 999  # Limits of `npu_rotary_mul`.
_LONGEST_GATED = 8192  # Limit of `npu_swiglu_quant`: numbers of a row.

_offsets: dict[torch.device, torch.Tensor] = {}


@or_else(reference.rms_norm)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor | None:
    if not _takes(x, weight):
        return None
    result: torch.Tensor = torch.ops.npu.npu_rms_norm(x, weight, epsilon=eps)[0]
    return result


@or_else(reference.add_rms_norm)
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor] | None:
    if not _takes(x, residual, weight):
        return None
    result, _, total = torch.ops.npu.npu_add_rms_norm(x, residual, weight, epsilon=eps)
    return result, total


@or_else(reference.silu_and_mul)
def silu_and_mul(x: torch.Tensor) -> torch.Tensor | None:
    if not _takes(x):
        return None
    result: torch.Tensor = torch.ops.npu.npu_swiglu(x.contiguous(), dim=-1)
    return result


@or_else(reference.rotary_embedding)
def rotary_embedding(
    x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor
) -> torch.Tensor | None:
    _, heads, size = x.shape
    if not _takes(x, cos, signed_sin) or size > _WIDEST_HEAD or heads > _MOST_HEADS:
        return None
    # The kernel negates the second half of x itself and needs both halves of the sine equal.
    sin = signed_sin[..., size // 2 :].repeat(1, 1, 2)
    # Four dimensions: one sequence, its tokens, their heads.
    result: torch.Tensor = torch.ops.npu.npu_rotary_mul(x[None], cos[None], sin[None])
    return result[0]


def norm_rotary_embedding(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
) -> torch.Tensor:
    heads = torch.cat((rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)), dim=1)
    return rotary_embedding(heads, cos, signed_sin)


def _add_norm_then_static(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scale: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    normalised, total = add_rms_norm(x, residual, weight, eps)
    return quantize_static(normalised, scale, dtype), total


@or_else(_add_norm_then_static)
def add_rms_norm_quantize_static(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scale: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Supports float16 only. With bfloat16 the kernel needs the scale in bfloat16 too, which loses
    2^-9 of it.
    """
    if x.dtype != torch.float16 or dtype != torch.int8 or not _takes(x, residual, weight):
        return None
    scales = scale.expand(x.shape[-1]).contiguous()
    numbers, _, total = torch.ops.npu.npu_add_rms_norm_quant(
        x, residual, weight, scales, None, epsilon=eps
    )
    return numbers, total


def _add_norm_then_dynamic(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    group: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    normalised, total = add_rms_norm(x, residual, weight, eps)
    return *quantize_dynamic(normalised, group, dtype), total


@or_else(_add_norm_then_dynamic)
def add_rms_norm_quantize_dynamic(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    group: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    if (
        x.dtype not in _HALVES
        or dtype != torch.int8
        or group != x.shape[-1]
        or not _takes(x, residual, weight)
    ):
        return None
    numbers, _, total, scale, _ = torch.ops.npu.npu_add_rms_norm_dynamic_quant(
        x, residual, weight, epsilon=eps, output_mask=[True, False]
    )
    return numbers, scale.view(*x.shape[:-1], 1), total


def _silu_then_static(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return quantize_static(silu_and_mul(x), scale, dtype)


@or_else(_silu_then_static)
def silu_and_mul_quantize_static(
    x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor | None:
    """Quantise with one scale. Scales per row are not supported: their meaning differs between
    versions of CANN, and some versions crash.
    """
    if dtype != torch.int8 or x.shape[-1] > _LONGEST_GATED or not x.is_contiguous():
        return None
    if not _takes(x) or (offset := _no_offset(x.device)) is None:
        return None
    numbers: torch.Tensor = torch.ops.npu.npu_swiglu_quant(
        x, smooth_scales=scale.reciprocal(), offsets=offset, activate_left=True
    )[0]
    return numbers


def _takes(x: torch.Tensor, *others: torch.Tensor) -> bool:
    """Return whether kernels support these tensors: x is not empty, and all have one supported
    dtype.
    """
    return x.dtype in _FLOATS and x.numel() > 0 and all(each.dtype == x.dtype for each in others)


def _no_offset(device: torch.device) -> torch.Tensor | None:
    """Return a zero [1] float32, made once.

    While a graph is captured, return None if it does not exist yet, because the graph's pool must
    not hold it.
    """
    found = _offsets.get(device)
    if found is None and not torch.npu.is_current_stream_capturing():  # type: ignore[attr-defined]
        found = _offsets[device] = torch.zeros(1, dtype=torch.float32, device=device)
    return found


for _name in TRACED.keys() & globals():
    _LIBRARY.impl(_name, globals()[_name], "PrivateUse1")  # type: ignore[no-untyped-call]
