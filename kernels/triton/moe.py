"""Layers of experts in Triton. Signature and meaning are those of `kernels.reference`.

Rows are grouped by expert, and each block of rows finds its expert in a table that is made on the
device. The greatest number of blocks depends only on the number of tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .. import reference
from .moe_kernels import expert_linear_kernel


class _Blocks(NamedTuple):
    """For each block of rows its expert, or -1 for none, and its first row. `ends` are the ends of
    experts.
    """

    rows: int
    experts: torch.Tensor
    firsts: torch.Tensor
    ends: torch.Tensor


class _Tiles(NamedTuple):
    """Tile sizes of a product, and how many tiles are loaded ahead."""

    rows: int
    columns: int
    deep: int
    num_warps: int
    num_stages: int


def _tiles(pairs: int, experts: int, dtype: torch.dtype) -> _Tiles:
    """Choose tiles by the average rows per expert. Tiles of float32 are shorter, because numbers
    have twice the bytes.
    """
    if pairs <= 16 * experts:
        tiles = _Tiles(16, 64, 128, 4, 4)
    elif pairs <= 64 * experts:
        tiles = _Tiles(64, 64, 64, 4, 4)
    else:
        tiles = _Tiles(128, 128, 64, 8, 3)
    return tiles._replace(deep=32) if dtype == torch.float32 else tiles


def _blocks(rows: int, chosen: torch.Tensor, experts: int) -> _Blocks:
    """Return the blocks of experts `chosen` in ascending order. Rows of no expert have the number
    `experts` and come last.
    """
    numbers = torch.arange(experts, device=chosen.device)
    ends = torch.searchsorted(chosen, numbers, right=True)
    begins = torch.searchsorted(chosen, numbers)
    last_blocks = ((ends - begins + rows - 1) // rows).cumsum(0)
    most = min(experts, len(chosen)) + len(chosen) // rows
    blocks = torch.arange(most, device=chosen.device)
    owners = torch.searchsorted(last_blocks, blocks, right=True)
    known = owners.clamp(max=experts - 1)
    # The expert's blocks are the last of the blocks up to its own last one.
    own = (ends - begins + rows - 1) // rows
    within = blocks - (last_blocks[known] - own[known])
    found = torch.where(owners < experts, owners, -1)
    return _Blocks(rows, found.int(), (begins[known] + within * rows).int(), ends.int())


def _linear(
    x: torch.Tensor,
    sources: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    blocks: _Blocks,
    tiles: _Tiles,
) -> torch.Tensor:
    """Multiply rows `sources` of x [T, K] by the weight [E * N, K] of their experts: [P, N]. Rows
    of no expert stay uninitialised.
    """
    columns, size = weight.shape[0] // len(blocks.ends), weight.shape[1]
    out = torch.empty(len(sources), columns, dtype=x.dtype, device=x.device)
    grid = len(blocks.experts), -(-columns // tiles.columns)
    expert_linear_kernel[grid](
        x,
        sources,
        weight,
        out if bias is None else bias,
        out,
        blocks.experts,
        blocks.firsts,
        blocks.ends,
        columns,
        size,
        x.stride(0),
        HAS_BIAS=bias is not None,
        WHOLE=size % tiles.deep == 0,
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.columns,
        BLOCK_K=tiles.deep,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return out


def fused_moe(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down: torch.Tensor,
    down_bias: torch.Tensor | None,
    limit: float,
    weighs_input: bool,
) -> torch.Tensor:
    (tokens, each), hidden = topk_ids.shape, x.shape[1]
    experts, pairs = down.shape[0] // hidden, tokens * each
    if pairs == 0:
        return x.new_empty(x.shape)
    assert x.stride(1) == 1 and gate_up.is_contiguous() and down.is_contiguous()
    flat, weights = topk_ids.flatten(), topk_weights.reshape(-1, 1)
    chosen, order = torch.where((flat >= 0) & (flat < experts), flat, experts).sort(stable=True)
    tiles = _tiles(pairs, experts, x.dtype)
    blocks = _blocks(tiles.rows, chosen, experts)
    rows, sources = x, order // each
    if weighs_input:
        rows = (x[sources] * weights[order]).to(x.dtype)
        sources = torch.arange(pairs, device=x.device)
    between = _linear(rows, sources, gate_up, gate_up_bias, blocks, tiles)
    between = reference.activated(between, down.shape[1], limit)
    own = torch.arange(pairs, device=x.device)
    results = _linear(between, own, down, down_bias, blocks, tiles)
    results = results.masked_fill((chosen == experts)[:, None], 0.0)
    summed = torch.empty_like(results).index_copy_(0, order, results)
    if not weighs_input:
        return (summed * weights).view(tokens, each, hidden).sum(1).to(x.dtype)
    return summed.view(tokens, each, hidden).sum(1)
