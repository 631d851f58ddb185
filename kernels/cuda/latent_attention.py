"""Attention over latent vectors by flashinfer, which reads them as they are kept
(`kernels.latent_attention`, absorbed).

H query heads; a latent vector has R numbers, the key that is turned and shared P more behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..attention import KVLayout

DTYPES = (torch.bfloat16, torch.float16)
_SIZES = (512, 64)
"""R and P: the tiles of its kernels fill the memory of a multiprocessor with these."""
_TILE = 64
"""Rows of the smaller tile, each of one head's query of one token; the larger one has twice."""
_MOST_TILES = 8192
"""Its plan has places for twice as many parts, and splits long contexts into several."""


def obstacle(layout: KVLayout) -> str | None:
    """Why flashinfer cannot compute a latent layer's attention; None where it can."""
    if layout.dtype not in DTYPES or layout.cache_dtype is not None:
        dtype = str(layout.cache_dtype or layout.dtype).removeprefix("torch.")
        return f"flashinfer reads latent vectors in bfloat16 and float16, not in {dtype}"
    if not layout.is_plain or layout.window is not None:
        return "flashinfer knows no windows, soft caps and sinks of latent layers"
    sizes = layout.value_size, layout.key_size - layout.value_size
    if sizes != _SIZES:
        return f"flashinfer has kernels for latent vectors of 512 + 64 numbers, not of {sizes}"
    return None


def refuses(layout: KVLayout, query_lens: Sequence[int]) -> bool:
    """Whether flashinfer refuses a step of so many new tokens a request: the queries of a token
    must not lie in two tiles, but for decodes, for its kernels would then lose a key
    (`_validate_fa_causal_tile_bound` in its sources), and there are places for so many tiles.
    """
    heads = layout.num_heads
    divided = max(query_lens, default=0) > 1 and _TILE % heads and heads != 2 * _TILE
    return bool(divided) or sum(-(-new * heads // _TILE) for new in query_lens) > _MOST_TILES


def make_wrapper(flashinfer: Any, workspace: torch.Tensor, **graph: Any) -> Any:
    """`graph`: the tensors that hold a step's figures where it is recorded. The kernels are those
    that can be planned again for a graph that is recorded.
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
    """`pages`: where each request's queries and pages begin, [B + 1] on the host, and the pages;
    `lengths` [B]: tokens of each. All int32.
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
    """q [T, H, R + P] over a cache [pages, page size, 1, R + P] into out [T, H, R]."""
    wrapper.run(query=q, kv_cache=cache.squeeze(2), out=out)
