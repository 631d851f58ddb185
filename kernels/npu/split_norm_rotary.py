"""Splits a row of queries, keys and values, normalises and rotates the heads of the first two, by a
Triton kernel of sgl-kernel-npu.

Signature, limits and meaning are those of `split_qkv_rmsnorm_rope` in its norm/ folder (described
in tests/npu_contract/sgl_kernel_npu.json). It has not run on an NPU here.
"""

from __future__ import annotations

from typing import Any

import torch

from . import ops
from .refusals import or_else
from .sgl_kernels import launch

_LIBRARY = torch.library.Library("piecework", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "split_norm_rotary(Tensor qkv, Tensor q_weight, Tensor k_weight, float eps, Tensor cos, "
    "Tensor signed_sin, int heads, int kv_heads) -> (Tensor, Tensor, Tensor)"
)  # type: ignore[no-untyped-call]


def _plain(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    heads: int,
    kv_heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q [T, heads, D], k and v [T, kv heads, D] of qkv [T, (heads + 2 * kv heads) * D].

    cos and signed_sin are [T, 1, D], as for `ops.rotary_embedding`.
    """
    rows = qkv.reshape(len(qkv), -1, cos.shape[-1])
    q, k, v = rows.tensor_split([heads, heads + kv_heads], dim=1)
    turned = ops.norm_rotary_embedding(q, k, q_weight, k_weight, eps, cos, signed_sin)
    q, k = turned.tensor_split([heads], dim=1)
    return q.contiguous(), k.contiguous(), v.contiguous()


@or_else(_plain)
def split_norm_rotary(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    heads: int,
    kv_heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Supports bfloat16, heads of a power of two, and as many query heads per key head."""
    size = cos.shape[-1]
    tensors = (qkv, q_weight, k_weight, cos, signed_sin)
    if (
        any(each.dtype != torch.bfloat16 for each in tensors)
        or qkv.numel() == 0
        or size & (size - 1)
        or heads % kv_heads
    ):
        return None
    # The kernel negates the second half of a head itself and needs both halves of the sine equal.
    sin = signed_sin[..., size // 2 :].repeat(1, 1, 2)
    parts = launch(
        "norm.split_qkv_rmsnorm_rope",
        "split_qkv_rmsnorm_rope",
        input=qkv.contiguous(),
        sin=sin,
        cos=cos.contiguous(),
        q_hidden_size=heads * size,
        kv_hidden_size=kv_heads * size,
        head_dim=size,
        eps=eps,
        q_weight=q_weight,
        k_weight=k_weight,
    )
    q, k, v = (part.view(len(part), -1, size) for part in parts)
    return q, k, v


def _meta(qkv: torch.Tensor, *given: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    *_, cos, _, heads, kv_heads = given
    tokens, size = qkv.shape[0], cos.shape[-1]
    q, k, v = (qkv.new_empty(tokens, each, size) for each in (heads, kv_heads, kv_heads))
    return q, k, v


_LIBRARY.impl("split_norm_rotary", split_norm_rotary, "PrivateUse1")  # type: ignore[no-untyped-call]
_LIBRARY.impl("split_norm_rotary", _meta, "Meta")  # type: ignore[no-untyped-call]
OP = torch.ops.piecework.split_norm_rotary.default
