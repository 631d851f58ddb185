"""Attention as one op, `piecework::attention`: the only op that touches the KV cache, and where
graphs are cut. `piecework::attention_quantize` is the same with a result in 8 bits, which a pass
puts in its place, `piecework::latent_attention` that of layers which keep latent vectors, and
`piecework::sparse_latent_attention` that of layers whose queries see a choice of those alone.
"""

from __future__ import annotations

import torch

from ...compilation.core.split_ops import register_split_op
from ...kernels import ops
from ...kernels.attention import AttentionMetadata, QuantizedAttention
from ...kernels.latent_attention import LatentLayer, LatentPlan, are_long, plan_latent, run_latent
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
    pool = context.pool
    call = LatentLayer(q, k, weight, out, pool.k[layer], pool.layouts[layer])
    run_latent(context.backend, call, context.plan, _latent_plan(context, context.metadata, call))


def _latent_plan(
    context: ForwardContext, metadata: AttentionMetadata | None, call: LatentLayer
) -> LatentPlan | None:
    """Which requests of `metadata` are expanded, found by the step's first layer."""
    memo, backend = context.memo, context.backend
    if "latent" not in memo and metadata is not None:
        # Without pages there is nothing to be expanded.
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
            f"a text of {max(metadata.seq_lens)} tokens has no vector here: in texts of more than "
            f"{layout.selected} this model chooses what tokens see; send shorter texts"
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


def sparse_latent_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    weight: torch.Tensor,
    value_size: int,
    layer: int,
    index: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """`latent_attention` where each query sees some of the tokens before it: those that `index`
    chooses, queries [T, I, D], keys [T, D] and weights [T, I] float32 (`kernels.sparse_attention`);
    None: those of the layer before.
    """
    out = q.new_empty(*q.shape[:2], value_size)
    index_q, index_k, index_weights = index or (None, None, None)
    torch.ops.piecework.sparse_latent_attention(
        q, k, weight, out, index_q, index_k, index_weights, layer
    )
    return out.flatten(1)
