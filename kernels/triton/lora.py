"""The updates of adapters (LoRA) in Triton. Signature and meaning are those of `kernels.lora`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import reference
from .lora_kernels import expand_kernel, shrink_kernel
from .tiles import power_of_2

_TOKENS = 16  # Tokens of a block: the fewest that a matrix instruction takes.
_COLUMNS = 64  # Columns of y of a program.
_DEEP = 64  # Columns of x that are multiplied at once.
_MOST_SPLITS = 8  # Programs that share the columns of x.
_RANKS, _MOST_RANKS = 16, 64  # Numbers of an adapter's rank that are computed at once.


def lora(
    y: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scales: torch.Tensor,
    ranks: torch.Tensor,
    slots: torch.Tensor,
    rows: Sequence[int],
) -> torch.Tensor:
    """See `kernels.lora.lora`. If `b` has several panels, use plain torch."""
    if b.shape[1] != 1 or y.stride(-1) != 1 or x.stride(-1) != 1:
        return reference.lora(y, x, a, b, scales, ranks, slots, rows)
    num_slots, parts, size, rank = a.shape
    tokens, columns = y.shape
    out = torch.empty((tokens, columns), dtype=y.dtype, device=y.device)
    if tokens == 0:
        return out
    splits = min(_MOST_SPLITS, -(-size // _DEEP))
    split_size = -(-size // (splits * _DEEP)) * _DEEP
    narrow = torch.empty((splits, tokens, parts, rank), dtype=torch.float32, device=y.device)
    blocks, block_r = -(-tokens // _TOKENS), min(_MOST_RANKS, max(_RANKS, power_of_2(rank)))
    rank_blocks = -(-rank // block_r)
    shrink_kernel[(blocks, parts * splits * rank_blocks, num_slots)](
        *(x, a, scales, ranks, slots, narrow, tokens, x.stride(0)),
        SIZE=size,
        PARTS=parts,
        RANK=rank,
        SPLITS=splits,
        SPLIT_SIZE=split_size,
        RANK_BLOCKS=rank_blocks,
        BLOCK_T=_TOKENS,
        BLOCK_K=_DEEP,
        BLOCK_R=block_r,
    )
    begin = 0
    for part, count in enumerate(rows):
        expand_kernel[(blocks, -(-count // _COLUMNS))](
            *(y, narrow, b, ranks, slots, out, tokens, y.stride(0), part, begin, begin + count),
            COLUMNS=columns,
            PARTS=parts,
            SLOTS=num_slots,
            RANK=rank,
            SPLITS=splits,
            BLOCK_T=_TOKENS,
            BLOCK_N=_COLUMNS,
            BLOCK_R=_RANKS,
        )
        begin += count
    return out
