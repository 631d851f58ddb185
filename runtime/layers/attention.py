"""Attention as ops. Only these ops read and write the KV cache, and graphs are cut at them.

- `piecework::attention`: attention over cached keys and values.
- `piecework::attention_quantize`: the same with a result in 8 bits. A pass inserts it.
- `piecework::latent_attention`: attention of layers that cache latent vectors.
- `piecework::sparse_latent_attention`: the same where a query sees only selected vectors.
"""

from __future__ import annotations

import torch

from ...compilation.core.split_ops import register_split_op
from ...kernels import ops
from ...kernels.attention import AttentionMetadata, QuantizedAttention
from ...kernels.latent_attention import LatentLayer, LatentPlan, are_long, plan_latent, run_latent
from ...kernels.span_attention import attend_spans
from ...kernels.sparse_attention import (
    Index,
    SparsePlan,
    choose,
    plan_sparse,
    run_sparse,
    store_index,
)
from ..core.forward_context import ForwardContext, current_context, layer_begins

_LIBRARY = torch.library.Library("piecework", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("attention(Tensor q, Tensor k, Tensor v, Tensor(a!) out, int layer) -> ()")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "attention_quantize(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor scale, int layer) "
    "-> ()"
)  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "latent_attention(Tensor q, Tensor k, Tensor weight, Tensor(a!) out, int layer) -> ()"
)  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "sparse_latent_attention(Tensor q, Tensor k, Tensor weight, Tensor(a!) out, Tensor? index_q, "
    "Tensor? index_k, Tensor? index_weights, int layer) -> ()"
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
    if context.images is not None and context.images.spans and context.metadata is not None:
        metadata = context.metadata
        if pool.second[layer] and metadata.window is not None:
            metadata = metadata.window
        caches = pool.k[layer], pool.v[layer]
        attend_spans(q, out, caches, metadata, pool.layouts[layer], context.images.spans)


def _attention_quantize(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    scale: torch.Tensor,
    layer: int,
) -> None:
    """Compute `_attention` and `quantize_static`, in one call if the backend can."""
    context = current_context()
    has_spans = context.images is not None and bool(context.images.spans)
    if has_spans or not isinstance(context.backend, QuantizedAttention):
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
    pool = context.pool
    call = LatentLayer(q, k, weight, out, pool.k[layer], pool.layouts[layer])
    run_latent(context.backend, call, context.plan, _latent_plan(context, context.metadata, call))


def _latent_plan(
    context: ForwardContext, metadata: AttentionMetadata | None, call: LatentLayer
) -> LatentPlan | None:
    """Return the plan of expanded requests. The first layer of a step makes it."""
    memo, backend = context.memo, context.backend
    if "latent" not in memo and metadata is not None:
        # Without pages nothing is expanded.
        is_long = are_long(metadata, call, backend) if metadata.block_table.dim() == 2 else []
        memo["latent"] = plan_latent(backend, metadata, context.pool.page_size, is_long)
    plan: LatentPlan | None = memo.get("latent")
    return plan


def _sparse_latent_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    index_q: torch.Tensor | None,
    index_k: torch.Tensor | None,
    index_weights: torch.Tensor | None,
    layer: int,
) -> None:
    layer_begins()
    context = current_context()
    pool, metadata, memo = context.pool, context.metadata, context.memo
    layout, index = pool.layouts[layer], None
    assert metadata is not None and layout.selected is not None
    if metadata.block_table.dim() != 2 and max(metadata.seq_lens) > layout.selected:
        raise ValueError(
            f"the text has {max(metadata.seq_lens)} tokens, but this model embeds texts of at most "
            f"{layout.selected} tokens; send shorter texts"
        )
    call = LatentLayer(q, k, weight, out, pool.k[layer], layout)
    if metadata.block_table.dim() != 2:
        run_latent(context.backend, call, context.plan, None)
        return
    if index_q is not None and index_k is not None and index_weights is not None:
        index = Index(index_q, index_k, index_weights, pool.index[layer])
        store_index(index, metadata.slot_mapping)
    if "sparse" not in memo:
        memo["sparse"] = plan_sparse(context.backend, metadata, pool.page_size, layout.selected)
    plan: SparsePlan | None = memo["sparse"]
    if plan is None:
        run_latent(context.backend, call, context.plan, _latent_plan(context, metadata, call))
        return
    if index is not None:
        memo["chosen"] = choose(index, plan.long, layout)
    latent = None if plan.rows is None else _latent_plan(context, plan.metadata, call)
    run_sparse(context.backend, call, plan, latent, memo["chosen"])


_KERNELS = {
    name: register_split_op(f"piecework::{name}", run)
    for name, run in (
        ("attention", _attention),
        ("attention_quantize", _attention_quantize),
        ("latent_attention", _latent_attention),
        ("sparse_latent_attention", _sparse_latent_attention),
    )
}
for _name in _KERNELS:
    _LIBRARY.impl(_name, lambda *arguments: None, "Meta")  # type: ignore[no-untyped-call]
_registered: set[str] = set()


def register_attention(dispatch_key: str) -> None:
    """Register the ops for a platform's dispatch key. Repeated calls do nothing."""
    if dispatch_key not in _registered:
        for name, kernel in _KERNELS.items():
            _LIBRARY.impl(name, kernel, dispatch_key)  # type: ignore[no-untyped-call]
        _registered.add(dispatch_key)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
    """Return causal attention [T, H * E] of q [T, H, D] over the cached and the new k [T, K, D] and
    v [T, K, E].

    The result buffer is allocated here, in the part that a graph captures, so that its address
    belongs to the graph.
    """
    out = q.new_empty(*q.shape[:2], v.shape[2])
    torch.ops.piecework.attention(q, k, v, out, layer)
    return out.flatten(1)


def latent_attention(
    q: torch.Tensor, k: torch.Tensor, weight: torch.Tensor, value_size: int, layer: int
) -> torch.Tensor:
    """Return causal attention [T, H * V] of q [T, H, N + P] over latent vectors.

    k [T, 1, R + P] are the new vectors. Their products with `weight` [H * (N + V), R] are the keys
    and values. V is `value_size`.
    """
    out = q.new_empty(*q.shape[:2], value_size)
    torch.ops.piecework.latent_attention(q, k, weight, out, layer)
    return out.flatten(1)


def sparse_latent_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    weight: torch.Tensor,
    value_size: int,
    layer: int,
    index: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Return `latent_attention` in which each query sees only selected tokens.

    `index` selects them by queries [T, I, D], keys [T, D] and weights [T, I] float32
    (`kernels.sparse_attention`). If `index` is None, the selection of the previous layer is used.
    """
    out = q.new_empty(*q.shape[:2], value_size)
    index_q, index_k, index_weights = index or (None, None, None)
    torch.ops.piecework.sparse_latent_attention(
        q, k, weight, out, index_q, index_k, index_weights, layer
    )
    return out.flatten(1)
