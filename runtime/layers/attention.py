"""Attention as one op, `piecework::attention`: the only op that touches the KV cache, and where
graphs are cut.
"""

from __future__ import annotations

import torch

from ...compilation.split_ops import register_split_op
from ..executor.forward_context import current_context, layer_begins

_LIBRARY = torch.library.Library("piecework", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("attention(Tensor q, Tensor k, Tensor v, Tensor(a!) out, int layer) -> ()")  # type: ignore[no-untyped-call]


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, layer: int
) -> None:
    layer_begins()
    context = current_context()
    pool = context.pool
    context.backend.run(
        q, k, v, out, pool.k[layer], pool.v[layer], context.plan, pool.layouts[layer]
    )


def _attention_meta(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, layer: int
) -> None:
    """Shapes are the caller's; nothing is returned."""


_KERNEL = register_split_op("piecework::attention", _attention)
_LIBRARY.impl("attention", _attention_meta, "Meta")  # type: ignore[no-untyped-call]
_registered: set[str] = set()


def register_attention(dispatch_key: str) -> None:
    """Make the op run on tensors of a platform's dispatch key; calling again is harmless."""
    if dispatch_key not in _registered:
        _LIBRARY.impl("attention", _KERNEL, dispatch_key)  # type: ignore[no-untyped-call]
        _registered.add(dispatch_key)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
    """Causal attention of q [T, H, D] over the cached and the new k [T, K, D] and v [T, K, E];
    returns [T, H * E].

    The result goes into a buffer made here, on the side that a graph captures, so that its address
    is the graph's own.
    """
    out = q.new_empty(*q.shape[:2], v.shape[2])
    torch.ops.piecework.attention(q, k, v, out, layer)
    return out.flatten(1)
