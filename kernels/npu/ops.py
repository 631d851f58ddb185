"""The ops that layers call on Ascend NPUs, `piecework::rms_norm` and its like: torch_npu's kernel
where it takes the call, else plain torch.

Signatures and meaning as in `kernels.reference`. Kernels round once, where the reference rounds to
16 bits in between. What they take is said in the op documentation of torch_npu 2.13
(`_op_plugin_docs.py`) and in that of the aclnn functions beneath them.
"""

from __future__ import annotations

import torch

from .. import reference
from ..ops import TRACED
from .sampling import UNIFORM_DTYPE, sample_filtered

__all__ = [
    "UNIFORM_DTYPE",
    "add_rms_norm",
    "norm_rotary_embedding",
    "rms_norm",
    "rotary_embedding",
    "sample_filtered",
    "silu_and_mul",
]

_LIBRARY = torch.library.Library("piecework", "FRAGMENT")  # type: ignore[no-untyped-call]
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_WIDEST_HEAD, _MOST_HEADS = 894, 999
"""Of `npu_rotary_mul`."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if not _takes(x, weight):
        return reference.rms_norm(x, weight, eps)
    result: torch.Tensor = torch.ops.npu.npu_rms_norm(x, weight, epsilon=eps)[0]
    return result


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if not _takes(x, residual, weight):
        return reference.add_rms_norm(x, residual, weight, eps)
    result, _, total = torch.ops.npu.npu_add_rms_norm(x, residual, weight, epsilon=eps)
    return result, total


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    if not _takes(x):
        return reference.silu_and_mul(x)
    result: torch.Tensor = torch.ops.npu.npu_swiglu(x.contiguous(), dim=-1)
    return result


def rotary_embedding(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    _, heads, size = x.shape
    if not _takes(x, cos, signed_sin) or size > _WIDEST_HEAD or heads > _MOST_HEADS:
        return reference.rotary_embedding(x, cos, signed_sin)
    # The kernel negates the second half of x itself, and wants both halves of the sine alike.
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


def _takes(x: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether kernels take such numbers: of one kind, and not none."""
    return x.dtype in _FLOATS and x.numel() > 0 and all(each.dtype == x.dtype for each in others)


for _name in TRACED.keys() & globals():
    _LIBRARY.impl(_name, globals()[_name], "PrivateUse1")  # type: ignore[no-untyped-call]
