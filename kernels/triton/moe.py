"""Layers of experts in Triton. Signatures and meaning are those of `kernels.reference`.

Rows are grouped by expert, and each block of rows finds its expert in a table that is made on the
device. The greatest number of blocks depends only on the number of tokens. A layer is nine
launches: the router's product, the choice of experts, three that group rows, two products, the
activation between them, and the sum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .moe_kernels import (
    choose_experts_kernel,
    combine_experts_kernel,
    count_pairs_kernel,
    expert_activation_kernel,
    expert_linear_kernel,
    lay_out_kernel,
    order_pairs_kernel,
)
from .tiles import BLOCK, power_of_2, warps

_PLACES = 16384  # Pairs of a chunk times experts that one program compares.
_CHUNKS = 16  # Chunks whose counts are read at once.


class Blocks(NamedTuple):
    """Rows of pairs grouped by expert, in blocks of at most `rows` rows of one expert.

    Attributes:
        order: [P] the pair of each row. Pairs of no expert have no row.
        experts: The expert of each block, or -1 for none.
        firsts: The first row of each block.
        ends: [E] the row after the last of each expert.
    """

    rows: int
    order: torch.Tensor
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


def choose_experts(
    logits: torch.Tensor,
    correction: torch.Tensor | None,
    top_k: int,
    sigmoid: bool,
    renormalized: bool,
    groups: int,
    top_groups: int,
    group_best: int,
    scale: float,
    least_sum: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, experts = logits.shape
    assert logits.stride(1) == 1
    ids = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    if tokens:
        block = power_of_2(experts)
        choose_experts_kernel[(tokens,)](
            logits,
            weights if correction is None else correction,
            ids,
            weights,
            logits.stride(0),
            scale,
            least_sum,
            EXPERTS=experts,
            EACH=top_k,
            SIGMOID=sigmoid,
            CORRECTED=correction is not None,
            RENORMALIZED=renormalized,
            GROUPS=groups,
            TOP_GROUPS=top_groups,
            GROUP_BEST=group_best,
            BLOCK=block,
            BLOCK_EACH=power_of_2(top_k),
            BLOCK_GROUPS=power_of_2(groups),
            BLOCK_MEMBERS=power_of_2(experts // groups),
            num_warps=min(4, warps(block)),
        )
    return ids, weights


def _whole(number: int) -> int:
    """Return a multiple of 4, so that int32 after it begin at a multiple of 16 bytes."""
    return -(-number // 4) * 4


def group_rows(topk_ids: torch.Tensor, experts: int, rows: int) -> Blocks:
    """Group the pairs of topk_ids [T, k] by expert, in blocks of `rows` rows."""
    pairs, device = topk_ids.numel(), topk_ids.device
    ids, wide = topk_ids.contiguous(), power_of_2(experts)
    chunk = max(16, min(power_of_2(pairs), _PLACES // wide))
    chunks = -(-pairs // chunk)
    # No expert has fewer rows than its blocks, and all but one block of each are full.
    blocks = _whole(min(experts, pairs) + pairs // rows)
    sizes = [chunks * wide, _whole(pairs), blocks, blocks, _whole(experts)]
    memory = torch.empty(sum(sizes), dtype=torch.int32, device=device)
    counts, order, owners, firsts, ends = torch.split(memory, sizes)
    many = 8 if chunk * wide > 4096 else 4
    count_pairs_kernel[(chunks,)](
        ids, counts, pairs, EXPERTS=experts, BLOCK_E=wide, CHUNK=chunk, num_warps=many
    )
    lay_out_kernel[(1,)](
        counts,
        ends,
        owners,
        firsts,
        chunks,
        blocks,
        EXPERTS=experts,
        BLOCK_E=wide,
        ROWS=rows,
        BLOCK_B=max(1, min(64, _PLACES // wide)),
        CHUNKS=_CHUNKS,
        num_warps=8,
    )
    order_pairs_kernel[(chunks,)](
        ids, counts, order, pairs, EXPERTS=experts, BLOCK_E=wide, CHUNK=chunk, num_warps=many
    )
    return Blocks(rows, order, owners, firsts, ends)


def activated(x: torch.Tensor, size: int, limit: float) -> torch.Tensor:
    """Return `reference.activated` of x, contiguous."""
    out = x.new_empty(x.shape[0], size)
    of_gates = "clamped" if limit > 0 else "gelu" if limit < 0 else "silu"
    kind = "relu2" if x.shape[1] == size else of_gates
    block = min(BLOCK, power_of_2(size))
    expert_activation_kernel[(x.shape[0], -(-size // block))](
        x, out, limit, SIZE=size, KIND=kind, BLOCK=block, num_warps=warps(block)
    )
    return out


def combined(
    results: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    experts: int,
    *,
    is_weighed: bool,
) -> torch.Tensor:
    """Return the sum [T, H] of the results [P, H] of each token's pairs."""
    (tokens, each), size = topk_ids.shape, results.shape[1]
    out = results.new_empty(tokens, size)
    block = min(BLOCK, power_of_2(size))
    combine_experts_kernel[(tokens, -(-size // block))](
        results,
        topk_ids.contiguous(),
        topk_weights.contiguous(),
        out,
        EXPERTS=experts,
        EACH=each,
        WEIGHED=is_weighed,
        SIZE=size,
        BLOCK=block,
        num_warps=warps(block),
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
    tiles = _tiles(pairs, experts, x.dtype)
    blocks = group_rows(topk_ids, experts, tiles.rows)
    weights = topk_weights.contiguous()

    def linear(
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        each: int,
        *,
        spreads: bool,
    ) -> torch.Tensor:
        """Multiply the rows of pairs by the weight [E * N, K] of their experts: [P, N]."""
        columns, size = weight.shape[0] // experts, weight.shape[1]
        out = rows.new_empty(pairs, columns)
        grid = len(blocks.experts), -(-columns // tiles.columns)
        expert_linear_kernel[grid](
            rows,
            blocks.order,
            weights,
            weight,
            out if bias is None else bias,
            out,
            blocks.experts,
            blocks.firsts,
            blocks.ends,
            columns,
            size,
            rows.stride(0),
            EACH=each,
            WEIGHED=weighs_input and each > 0,
            SPREADS=spreads,
            HAS_BIAS=bias is not None,
            WHOLE=size % tiles.deep == 0,
            BLOCK_M=tiles.rows,
            BLOCK_N=tiles.columns,
            BLOCK_K=tiles.deep,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
        return out

    between = linear(x, gate_up, gate_up_bias, each, spreads=False)
    between = activated(between, down.shape[1], limit)
    results = linear(between, down, down_bias, 0, spreads=True)
    return combined(results, topk_ids, weights, experts, is_weighed=not weighs_input)
