"""Attention with soft caps, slopes and sinks, in plain torch."""

from __future__ import annotations

import torch

from .attention import KVLayout


def weigh(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
    layout: KVLayout,
) -> torch.Tensor:
    """Attend from q [b, n, H, D] to keys [b, s, K, D] and values [b, s, K, E]: [b, n, H, E],
    computed in float32.

    `mask` is added to scores, as [n, s] or [b, 1, 1, s]. `positions` [b or 1, n] are the indices of
    the keys that have the positions of the queries.
    """
    grouped = q.unflatten(2, (layout.num_kv_heads, -1)).float()  # type: ignore[no-untyped-call]
    scores = torch.einsum("bnkgd,bskd->bkgns", grouped, keys.float()) * layout.scale
    if layout.softcap is not None:
        scores = torch.tanh(scores / layout.softcap) * layout.softcap
    if layout.slopes is not None:
        distances = torch.arange(keys.shape[1], device=q.device) - positions[..., None]
        slopes = layout.slopes.view(layout.num_kv_heads, -1, 1, 1)
        scores += slopes * distances[:, None, None]
    scores += mask if mask.dim() == 2 else mask[:, None]
    if layout.sinks is not None:
        sinks = layout.sinks.view(1, layout.num_kv_heads, -1, 1, 1)
        scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[1]]
    return torch.einsum("bkgns,bskd->bnkgd", weights, values.float()).flatten(2, 3).to(q.dtype)
