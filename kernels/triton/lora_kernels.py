"""Triton kernels of the updates of adapters (LoRA).

The tokens of a block may have any adapters. A program that finds no token of its slot returns at
once, so launches depend on the numbers of tokens and of slots alone, and graphs can repeat them.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def shrink_kernel(
    x,
    a,
    scales,
    ranks,
    slots,
    narrow,
    tokens,
    x_stride,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    RANK_BLOCKS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Program (block of tokens, (part, split of x's columns, block of ranks), slot): a summand of
    narrow [SPLITS, tokens, PARTS, RANK] float32 for the tokens with the slot.
    """
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    slot = tl.program_id(2)
    own = tl.load(slots + token, mask=token < tokens, other=-1) == slot
    if tl.max(own.to(tl.int32), 0) == 0:
        return
    first_rank = tl.program_id(1) % RANK_BLOCKS * BLOCK_R
    split = tl.program_id(1) // RANK_BLOCKS % SPLITS
    part = tl.program_id(1) // (RANK_BLOCKS * SPLITS)
    place = (slot * PARTS + part).to(tl.int64)
    if first_rank >= tl.load(ranks + place):
        return
    rank = first_rank + tl.arange(0, BLOCK_R)
    row = token.to(tl.int64)
    sums = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
    for first in range(0, SPLIT_SIZE, BLOCK_K):
        within = first + tl.arange(0, BLOCK_K)
        column = split * SPLIT_SIZE + within
        live = (within < SPLIT_SIZE) & (column < SIZE)
        left = tl.load(
            x + row[:, None] * x_stride + column[None, :],
            mask=own[:, None] & live[None, :],
            other=0.0,
        )
        right = tl.load(
            a + (place * SIZE + column[:, None]) * RANK + rank[None, :],
            mask=live[:, None] & (rank < RANK)[None, :],
            other=0.0,
        )
        sums = tl.dot(left, right, sums, input_precision="ieee")
    sums *= tl.load(scales + place)
    to = ((split * tokens + row) * PARTS + part) * RANK
    tl.store(narrow + to[:, None] + rank[None, :], sums, mask=own[:, None] & (rank < RANK)[None, :])


@triton.jit
def expand_kernel(
    y,
    narrow,
    b,
    ranks,
    slots,
    out,
    tokens,
    y_stride,
    part,
    begin,
    end,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    SLOTS: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Program (block of tokens, block of the columns [begin, end) of a part): y and the updates of
    all adapters of the tokens.
    """
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = begin + tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = token.to(tl.int64)
    live = (token < tokens)[:, None] & (column < end)[None, :]
    sums = tl.load(y + row[:, None] * y_stride + column[None, :], mask=live, other=0.0)
    sums = sums.to(tl.float32)
    owner = tl.load(slots + token, mask=token < tokens, other=-1)
    # The smallest slot of the tokens, and then the next larger one.
    slot = tl.min(tl.where(owner < 0, SLOTS, owner), 0)
    while slot < SLOTS:
        own = owner == slot
        size = tl.load(ranks + slot * PARTS + part)
        update = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
        for first in range(0, size, BLOCK_R):
            rank = first + tl.arange(0, BLOCK_R)
            wide = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
            for split in range(SPLITS):
                at = ((split * tokens + row) * PARTS + part) * RANK
                wide += tl.load(
                    narrow + at[:, None] + rank[None, :],
                    mask=own[:, None] & (rank < size)[None, :],
                    other=0.0,
                )
            right = tl.load(
                b + (slot.to(tl.int64) * RANK + rank[:, None]) * COLUMNS + column[None, :],
                mask=(rank < size)[:, None] & (column < end)[None, :],
                other=0.0,
            )
            update = tl.dot(wide, right.to(tl.float32), update, input_precision="ieee")
        # Not a product with 0: other adapters may have numbers that are not finite.
        sums += tl.where(own[:, None], update, 0.0)
        slot = tl.min(tl.where(owner <= slot, SLOTS, owner), 0)
    tl.store(out + row[:, None] * COLUMNS + column[None, :], sums.to(out.dtype.element_ty), live)
