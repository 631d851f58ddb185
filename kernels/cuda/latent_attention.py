"""Attention over latent vectors as stored, by flashinfer (`kernels.latent_attention`, absorbed).

H query heads. A latent vector has R numbers, followed by P numbers of the rotated key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..attention import KVLayout

DTYPES = (torch.bfloat16, torch.float16)
# R and P. flashinfer's tiles fill the memory of a multiprocessor with these sizes.
_SIZES = (512, 64)
# Rows of the smaller tile. A row is the query of one head and token. The larger tile has twice as
# many.
_TILE = 64
# flashinfer's plan has room for twice as many parts, because it splits long contexts.
_MOST_TILES = 8192


def obstacle(layout: KVLayout) -> str | None:
    """Return why flashinfer cannot compute a latent layer's attention, or None if it can."""
    if layout.dtype not in DTYPES or layout.cache_dtype is not None:
        dtype = str(layout.cache_dtype or layout.dtype).removeprefix("torch.")
        return f"flashinfer reads latent vectors in bfloat16 and float16, not in {dtype}"
    if not layout.is_plain or layout.window is not None:
        return "flashinfer supports no windows, soft caps or sinks in latent layers"
    sizes = layout.value_size, layout.key_size - layout.value_size
    if sizes != _SIZES:
        return f"flashinfer has kernels for latent vectors of 512 + 64 numbers, not of {sizes}"
    return None


def refuses(layout: KVLayout, query_lens: Sequence[int]) -> bool:
    """Return whether flashinfer refuses a step with these numbers of new tokens.

    Except in decodes, the queries of a token must not lie in two tiles, because flashinfer's
    kernels would lose a key (`_validate_fa_causal_tile_bound` in its sources). The number of tiles
    is limited too.
    """
    heads = layout.num_heads
    divided = max(query_lens, default=0) > 1 and _TILE % heads and heads != 2 * _TILE
    return bool(divided) or sum(-(-new * heads // _TILE) for new in query_lens) > _MOST_TILES


def make_wrapper(flashinfer: Any, workspace: torch.Tensor, **graph: Any) -> Any:
    """Return a wrapper with kernels that can be planned again for a captured graph. `graph` holds
    the tensors of a captured step.
    """
    hopper = workspace.is_cuda and torch.cuda.get_device_capability(workspace.device)[0] == 9
    return flashinfer.mla.BatchMLAPagedAttentionWrapper(
        workspace, backend="fa3" if hopper else "fa2", **graph
    )


def plan(
    flashinfer: Any,
    wrapper: Any,
    layout: KVLayout,
    pages: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    lengths: torch.Tensor,
    page_size: int,
    *,
    causal: bool,
) -> None:
    """Plan a step. `pages` holds where each request's queries and pages begin, [B + 1] on the host,
    and the pages. `lengths` [B] are tokens. All are int32.
    """
    wrapper.plan(
        metadata=flashinfer.mla.MLAPlanMetadata.csr(*pages, lengths),
        num_heads=layout.num_heads,
        head_dim_ckv=layout.value_size,
        head_dim_kpe=layout.key_size - layout.value_size,
        page_size=page_size,
        causal=causal,
        sm_scale=layout.scale,
        q_data_type=layout.dtype,
        kv_data_type=layout.dtype,
    )


def run(
    wrapper: Any,
    q: torch.Tensor,
    cache: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Attend from q [T, H, R + P] to a cache [pages, page size, 1, R + P] and write out
    [T, H, R].
    """
    wrapper.run(query=q, kv_cache=cache.squeeze(2), out=out)
