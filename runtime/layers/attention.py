"""Attention as one op, `piecework::attention`: the only op that touches the KV cache, and where
graphs are cut. `piecework::attention_quantize` is the same with a result in 8 bits, which a pass
puts in its place, `piecework::latent_attention` that of layers which keep latent vectors.
"""

from __future__ import annotations

import torch

from ...compilation.split_ops import register_split_op
from ...kernels import ops
from ...kernels.attention import QuantizedAttention
from ...kernels.latent_attention import LatentLayer, are_long, plan_latent, run_latent
from ..executor.forward_context import current_context, layer_begins

_LIBRARY = torch.library.Library("piecework", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("attention(Tensor q, Tensor k, Tensor v, Tensor(a!) out, int layer) -> ()")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "attention_quantize(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor scale, int layer) "
    "-> ()"
)  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "latent_attention(Tensor q, Tensor k, Tensor weight, Tensor(a!) out, int layer) -> ()"
)  # type: ignore[no-untyped-call]


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, layer: int
) -> None:
    layer_begins()
    context = current_context()
    pool = context.pool
    context.backend.run(
        q, k, v, out, pool.k[layer], pool.v[layer], context.plan_of(layer), pool.layouts[layer]
    )


def _attention_quantize(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    scale: torch.Tensor,
    layer: int,
) -> None:
    """`_attention`, then `quantize_static`, by the backend where that writes 8 bits itself."""
    context = current_context()
    if not isinstance(context.backend, QuantizedAttention):
        result = q.new_empty(out.shape)
        _attention(q, k, v, result, layer)
        out.copy_(ops.quantize_static(result.flatten(1), scale, out.dtype).view(out.shape))
        return
    layer_begins()
    pool = context.pool
    context.backend.run_quantized(
        *(q, k, v, out, scale, pool.k[layer], pool.v[layer]),
        *(context.plan_of(layer), pool.layouts[layer]),
    )


def _latent_attention(
    q: torch.Tensor, k: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, layer: int
) -> None:
    layer_begins()
    context = current_context()
    pool, metadata, memo = context.pool, context.metadata, context.memo
    call = LatentLayer(q, k, weight, out, pool.k[layer], pool.layouts[layer])
    if "latent" not in memo and metadata is not None:
        # Without pages there is nothing to be expanded.
        is_long = (
            are_long(metadata, call, context.backend) if metadata.block_table.dim() == 2 else []
        )
        memo["latent"] = plan_latent(context.backend, metadata, pool.page_size, is_long)
    run_latent(context.backend, call, context.plan, memo.get("latent"))


_KERNELS = {
    name: register_split_op(f"piecework::{name}", run)
    for name, run in (
        ("attention", _attention),
        ("attention_quantize", _attention_quantize),
        ("latent_attention", _latent_attention),
    )
}
for _name in _KERNELS:
    _LIBRARY.impl(_name, lambda *arguments: None, "Meta")  # type: ignore[no-untyped-call]
_registered: set[str] = set()


def register_attention(dispatch_key: str) -> None:
    """Make the ops run on tensors of a platform's dispatch key; calling again is harmless."""
    if dispatch_key not in _registered:
        for name, kernel in _KERNELS.items():
            _LIBRARY.impl(name, kernel, dispatch_key)  # type: ignore[no-untyped-call]
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


def latent_attention(
    q: torch.Tensor, k: torch.Tensor, weight: torch.Tensor, value_size: int, layer: int
) -> torch.Tensor:
    """Causal attention of q [T, H, N + P] over latent vectors, of which k [T, 1, R + P] are new,
    whose products with `weight` [H * (N + V), R] are keys and values: [T, H * V].
    """
    out = q.new_empty(*q.shape[:2], value_size)
    torch.ops.piecework.latent_attention(q, k, weight, out, layer)
    return out.flatten(1)
