"""Triton kernels of layers of experts: which rows belong to which expert, rows times the weight of
their expert, and the sum of each token's results.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def choose_experts_kernel(
    logits,
    correction,
    ids,
    weights,
    logits_stride,
    scale,
    least_sum,
    EXPERTS: tl.constexpr,
    EACH: tl.constexpr,
    SIGMOID: tl.constexpr,
    CORRECTED: tl.constexpr,
    RENORMALIZED: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_EACH: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_MEMBERS: tl.constexpr,
):
    """Program t: `reference.choose_experts` of token t. Of equal scores, the first wins.

    With groups, a row of scores is [BLOCK_GROUPS, BLOCK_MEMBERS], else [1, BLOCK].
    """
    token = tl.program_id(0).to(tl.int64)
    if GROUPS > 1:
        MEMBERS: tl.constexpr = EXPERTS // GROUPS
        group = tl.arange(0, BLOCK_GROUPS)[:, None]
        member = tl.arange(0, BLOCK_MEMBERS)[None, :]
        expert = group * MEMBERS + member
        live = (group < GROUPS) & (member < MEMBERS)
    else:
        expert = tl.arange(0, BLOCK)[None, :]
        live = expert < EXPERTS
    low = float("-inf")
    logit = tl.load(logits + token * logits_stride + expert, mask=live, other=low).to(tl.float32)
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-logit))
    else:
        power = tl.exp(logit - tl.max(tl.max(logit, 1), 0))
        score = power / tl.sum(tl.sum(power, 1), 0)
    choice = score
    if CORRECTED:
        choice += tl.load(correction + expert, mask=live, other=0.0)
    choice = tl.where(live, choice, low)
    if GROUPS > 1:
        left = choice
        rating = tl.zeros((BLOCK_GROUPS,), tl.float32)
        for _ in tl.static_range(GROUP_BEST):
            best = tl.argmax(left, 1)[:, None]
            rating += tl.max(left, 1)
            left = tl.where(member == best, low, left)
        number = tl.arange(0, BLOCK_GROUPS)
        rating = tl.where(number < GROUPS, rating, low)
        kept = number < 0
        for _ in tl.static_range(TOP_GROUPS):
            best_group = tl.argmax(tl.where(kept, low, rating), 0)
            kept = kept | (number == best_group)
        choice = tl.where(kept[:, None], choice, low)
    place = tl.arange(0, BLOCK_EACH)
    chosen = tl.zeros((BLOCK_EACH,), tl.int32)
    weight = tl.zeros((BLOCK_EACH,), tl.float32)
    taken = expert < 0
    for index in tl.static_range(EACH):
        open_choice = tl.where(taken, low, choice)
        # A row of NaN chooses an expert all the same.
        most = tl.max(tl.max(open_choice, 1), 0)
        first = tl.where((open_choice == most) & live & ~taken, expert, EXPERTS)
        best = tl.minimum(tl.min(tl.min(first, 1), 0), EXPERTS - 1)
        own = tl.sum(tl.sum(tl.where(expert == best, tl.where(live, score, 0.0), 0.0), 1), 0)
        chosen = tl.where(place == index, best, chosen)
        weight = tl.where(place == index, own, weight)
        taken = taken | (expert == best)
    if RENORMALIZED:
        weight = weight / (tl.sum(weight, 0) + least_sum)
    weight *= scale
    asked = place < EACH
    tl.store(ids + token * EACH + place, chosen.to(tl.int64), mask=asked)
    tl.store(weights + token * EACH + place, weight, mask=asked)


@triton.jit
def _experts_of(ids, pair, pairs, EXPERTS: tl.constexpr):
    """Return the expert of each pair, or EXPERTS for none."""
    expert = tl.load(ids + pair, mask=pair < pairs, other=EXPERTS)
    return tl.where((expert >= 0) & (expert < EXPERTS), expert, EXPERTS).to(tl.int32)


@triton.jit(do_not_specialize=["pairs"])
def count_pairs_kernel(
    ids, counts, pairs, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr
):
    """Program c: how many of the chunk's pairs each expert has, in counts [chunks, BLOCK_E]."""
    chunk = tl.program_id(0)
    expert = _experts_of(ids, chunk * CHUNK + tl.arange(0, CHUNK), pairs, EXPERTS)
    each = tl.arange(0, BLOCK_E)
    is_own = (expert[:, None] == each[None, :]).to(tl.int32)
    tl.store(counts + chunk * BLOCK_E + each, tl.sum(is_own, 0))


@triton.jit(do_not_specialize=["chunks", "blocks"])
def lay_out_kernel(
    counts,
    ends,
    experts,
    firsts,
    chunks,
    blocks,
    EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """One program: sum `counts` of chunks up, and lay out the blocks of ROWS rows of each expert.

    Afterwards counts[c, e] is where the rows of chunk c and expert e begin. ends [EXPERTS]: the
    row after the last of each expert. experts, firsts [blocks]: the expert of a block, or -1 for
    none, and its first row.
    """
    each = tl.arange(0, BLOCK_E)
    total = tl.zeros((BLOCK_E,), tl.int32)
    for first in range(0, chunks, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)[:, None]
        total += tl.sum(
            tl.load(counts + chunk * BLOCK_E + each[None, :], mask=chunk < chunks, other=0), 0
        )
    total = tl.where(each < EXPERTS, total, 0)
    end = tl.cumsum(total, 0)
    begin = end - total
    tl.store(ends + each, end, mask=each < EXPERTS)
    running = begin
    for first in range(0, chunks, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)[:, None]
        place = counts + chunk * BLOCK_E + each[None, :]
        own = tl.load(place, mask=chunk < chunks, other=0)
        tl.store(place, running[None, :] + tl.cumsum(own, 0) - own, mask=chunk < chunks)
        running += tl.sum(own, 0)
    own_blocks = (total + ROWS - 1) // ROWS
    last = tl.cumsum(own_blocks, 0)
    first_block = last - own_blocks
    for start in range(0, blocks, BLOCK_B):
        block = start + tl.arange(0, BLOCK_B)
        is_own = (block[:, None] >= first_block[None, :]) & (block[:, None] < last[None, :])
        owner = tl.sum(tl.where(is_own, each[None, :] + 1, 0), 1) - 1
        row = begin[None, :] + (block[:, None] - first_block[None, :]) * ROWS
        tl.store(experts + block, owner, mask=block < blocks)
        tl.store(firsts + block, tl.sum(tl.where(is_own, row, 0), 1), mask=block < blocks)


@triton.jit(do_not_specialize=["pairs"])
def order_pairs_kernel(
    ids, begins, order, pairs, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr
):
    """Program c: write the number of each pair of the chunk to its row of `order` [P]."""
    chunk = tl.program_id(0)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = _experts_of(ids, pair, pairs, EXPERTS)
    each = tl.arange(0, BLOCK_E)
    is_own = expert[:, None] == each[None, :]
    begin = tl.load(begins + chunk * BLOCK_E + each)
    row = tl.cumsum(is_own.to(tl.int32), 0) - 1 + begin[None, :]
    row = tl.sum(tl.where(is_own, row, 0), 1)
    tl.store(order + row, pair, mask=expert < EXPERTS)


@triton.jit
def expert_linear_kernel(
    x,
    order,
    pair_weights,
    weight,
    bias,
    out,
    experts,
    firsts,
    ends,
    columns,
    size,
    x_stride,
    EACH: tl.constexpr,
    WEIGHED: tl.constexpr,
    SPREADS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply a block of rows of one expert by BLOCK_N rows of its weight [E, columns, size], into
    out [P, columns], contiguous.

    Row m belongs to pair order[m]. EACH above 0: the row of x is that of the pair's token, which
    has EACH pairs, and WEIGHED: it is multiplied by the pair's weight. EACH 0: it is row m.
    SPREADS: the result goes to the row of the pair, else to row m. `experts`, `firsts`, `ends`: see
    `lay_out_kernel`. WHOLE: size is a multiple of BLOCK_K.
    """
    block = tl.program_id(0)
    expert = tl.load(experts + block)
    if expert >= 0:
        m = tl.load(firsts + block) + tl.arange(0, BLOCK_M)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        live_m = m < tl.load(ends + expert)
        live_n = n < columns
        source = m
        if EACH > 0 or SPREADS:
            pair = tl.load(order + m, mask=live_m, other=0)
            if EACH > 0:
                source = pair // EACH
        x_place = x + source.to(tl.int64)[:, None] * x_stride + k[None, :]
        weight_row = expert.to(tl.int64) * columns + n
        weight_place = weight + weight_row[None, :] * size + k[:, None]
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for begin in range(0, size, BLOCK_K):
            live_x = live_m[:, None]
            live_weight = live_n[None, :]
            if not WHOLE:
                live_x = live_x & (begin + k < size)[None, :]
                live_weight = live_weight & (begin + k < size)[:, None]
            left = tl.load(x_place + begin, mask=live_x, other=0.0)
            right = tl.load(weight_place + begin, mask=live_weight, other=0.0)
            if WEIGHED:
                factor = tl.load(pair_weights + pair, mask=live_m, other=0.0)
                left = (left.to(tl.float32) * factor[:, None]).to(x.dtype.element_ty)
            total += tl.dot(left, right, input_precision="ieee")
        if HAS_BIAS:
            total += tl.load(bias + weight_row, mask=live_n, other=0.0).to(tl.float32)[None, :]
        row = pair if SPREADS else m
        tl.store(
            out + row.to(tl.int64)[:, None] * columns + n[None, :],
            total.to(out.dtype.element_ty),
            mask=live_m[:, None] & live_n[None, :],
        )


@triton.jit
def expert_activation_kernel(
    x, out, limit, SIZE: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (p, block): BLOCK columns of row p, out [P, SIZE]. x is contiguous.

    KIND: "silu", "gelu" or "clamped" of gates before ups [P, 2 * SIZE], or "relu2" of [P, SIZE].
    They round where `reference.activated` does.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < SIZE
    if KIND == "relu2":
        up = tl.maximum(tl.load(x + row * SIZE + column, mask=live, other=0.0).to(tl.float32), 0.0)
        value = up * up
    else:
        gate = tl.load(x + row * 2 * SIZE + column, mask=live, other=0.0).to(tl.float32)
        up = tl.load(x + row * 2 * SIZE + SIZE + column, mask=live, other=0.0).to(tl.float32)
        if KIND == "clamped":
            gate = tl.minimum(gate, limit)
            up = tl.minimum(tl.maximum(up, -limit), limit)
            value = gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
        else:
            # GELU by tanh is x times the sigmoid of a polynomial of x.
            slope = gate
            if KIND == "gelu":
                slope = 1.5957691216 * (gate + 0.044715 * gate * gate * gate)
            opened = (gate / (1.0 + tl.exp(-slope))).to(out.dtype.element_ty).to(tl.float32)
            value = opened * up
    tl.store(out + row * SIZE + column, value.to(out.dtype.element_ty), mask=live)


@triton.jit
def combine_experts_kernel(
    results,
    ids,
    weights,
    out,
    EXPERTS: tl.constexpr,
    EACH: tl.constexpr,
    WEIGHED: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (t, block): BLOCK columns of the sum of results [T, EACH, SIZE] of token t. Results
    of no expert are uninitialised memory. WEIGHED: each is multiplied by its weight.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for index in tl.static_range(EACH):
        pair = token * EACH + index
        expert = tl.load(ids + pair)
        live = (column < SIZE) & (expert >= 0) & (expert < EXPERTS)
        value = tl.load(results + pair * SIZE + column, mask=live, other=0.0).to(tl.float32)
        if WEIGHED:
            value *= tl.load(weights + pair)
        total += value
    tl.store(out + token * SIZE + column, total.to(out.dtype.element_ty), mask=column < SIZE)
