"""The Triton kernel that filters and draws. It searches for the drawn token's probability instead
of sorting the vocabulary.

Probabilities are not negative, so their bits, read as integers, have the same order. What top-k,
top-p and min-p keep are beginnings of the same descending order. Where each ends, and where the
draw falls, is a value that is found by bisection of its bits. Weights are probabilities in units of
2^-52 (`kernels.reference.UNIT`).
"""

from __future__ import annotations

import triton
import triton.language as tl

# Bins of the exponents of probabilities: 1 down to 2^-62, and all that is less.
_EXPONENTS = tl.constexpr(64)
# The first bin whose probabilities are below 2^-52 and have weight 0.
_WEIGHTLESS = tl.constexpr(53)
_EXPONENT_OF_1 = tl.constexpr(127)


@triton.jit
def _weight(p):
    return (p * 4503599627370496.0).to(tl.int64)


@triton.jit
def _above(source, size, pivot, BLOCK: tl.constexpr):
    """Return how many of source [size] have bits above `pivot`, and their weight."""
    count = tl.zeros((BLOCK,), tl.int32)
    weight = tl.zeros((BLOCK,), tl.int64)
    for begin in range(0, size, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        p = tl.load(source + place, mask=place < size, other=0.0)
        over = (p.to(tl.int32, bitcast=True) > pivot) & (place < size)
        count += over.to(tl.int32)
        weight += tl.where(over, _weight(p), 0)
    return tl.sum(count, 0), tl.sum(weight, 0)


@triton.jit
def _lowest(source, size, low, high, limit, BY_COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the lowest bits in [low, high] above which there are at most `limit` tokens, or tokens
    with a weight of at most `limit`. Return high if no lower bits fit.
    """
    while low < high:
        middle = low + (high - low) // 2
        count, weight = _above(source, size, middle, BLOCK)
        fits = count <= limit if BY_COUNT else weight <= limit
        low = tl.where(fits, low, middle + 1)
        high = tl.where(fits, middle, high)
    return low


@triton.jit
def _kept_by_top_k(source, size, low, high, top_k, total, BLOCK: tl.constexpr):
    """Return the weight of the `top_k` likeliest tokens. `total` is the weight of all."""
    bits = _lowest(source, size, low, high, top_k - 1, True, BLOCK)
    count, weight = _above(source, size, bits, BLOCK)
    return tl.minimum(weight + (top_k - count) * _weight(bits.to(tl.float32, bitcast=True)), total)


@triton.jit
def _kept_by_top_p(source, size, low, high, needed, BLOCK: tl.constexpr):
    """Return the weight of the fewest likeliest tokens that weigh at least `needed`."""
    bits = _lowest(source, size, low, high, needed - 1, False, BLOCK)
    _, weight = _above(source, size, bits, BLOCK)
    each = tl.maximum(_weight(bits.to(tl.float32, bitcast=True)), 1)
    return weight + (needed - weight + each - 1) // each * each


@triton.jit
def _share(factor, weight):
    """Return factor * weight, rounded up to a whole number. factor is float64."""
    exact = factor * weight.to(tl.float64)
    whole = exact.to(tl.int64)
    return whole + (whole.to(tl.float64) < exact).to(tl.int64)


@triton.jit
def _survey(row, vocab, room, BLOCK: tl.constexpr):
    """Return the bits of the largest of row [vocab], and the first bin of exponents that does not
    fit `room` candidates.
    """
    largest = tl.zeros((BLOCK,), tl.int32)
    bins = tl.zeros((_EXPONENTS,), tl.int32)
    for begin in range(0, vocab, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        bits = tl.load(row + place, mask=place < vocab, other=0.0).to(tl.int32, bitcast=True)
        largest = tl.maximum(largest, bits)
        # Triton 3.7's interpreter makes no tensor of a constexpr minus a tensor.
        bins += tl.histogram(
            tl.minimum(tl.maximum(-(bits >> 23) + _EXPONENT_OF_1, 0), _EXPONENTS - 1), _EXPONENTS
        )
    fitting = (tl.cumsum(bins, 0) <= room).to(tl.int32)
    return tl.max(largest, 0), tl.minimum(tl.sum(fitting, 0), _WEIGHTLESS)


@triton.jit
def _gather(row, vocab, candidates, ids, room, floor, BLOCK: tl.constexpr):
    """Copy numbers with bits above `floor` to `candidates` [room], in the order of ids. Return how
    many there are.
    """
    found = 0
    for begin in range(0, vocab, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        p = tl.load(row + place, mask=place < vocab, other=0.0)
        over = (p.to(tl.int32, bitcast=True) > floor) & (place < vocab)
        target = found + tl.cumsum(over.to(tl.int32), 0) - 1
        tl.store(candidates + target, p, mask=over & (target < room))
        tl.store(ids + target, place, mask=over & (target < room))
        found += tl.sum(over.to(tl.int32), 0)
    tl.debug_barrier()
    return found


@triton.jit
def _place_of(source, size, bits, rank, BLOCK: tl.constexpr):
    """Return the place in source [size] of the number with these bits that has `rank` equal numbers
    before it.
    """
    seen = 0
    result = 0
    for begin in range(0, size, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        p = tl.load(source + place, mask=place < size, other=0.0)
        equal = ((p.to(tl.int32, bitcast=True) == bits) & (place < size)).to(tl.int32)
        chosen = (equal != 0) & (seen + tl.cumsum(equal, 0) == rank + 1)
        result += tl.sum(tl.where(chosen, place, 0), 0)
        seen += tl.sum(equal, 0)
    return result


@triton.jit
def sample_filtered_kernel(
    probs,
    candidates,
    ids,
    top_ks,
    top_ps,
    min_ps,
    uniforms,
    drawn,
    vocab,
    row_stride,
    room,
    BLOCK: tl.constexpr,
):
    """Program n: row n of probs to drawn[n]. `candidates`, `ids` [N, room] are scratch memory.

    Tokens that are likely enough to matter are copied first. If `room` candidates do not hold what
    a flat row keeps, the row itself is searched, which is slower.
    """
    n = tl.program_id(0).to(tl.int64)
    row = probs + n * row_stride
    candidate_row = candidates + n * room
    id_row = ids + n * room
    top_k = tl.load(top_ks + n)
    top_p = tl.load(top_ps + n).to(tl.float64)
    one = tl.full((), 4503599627370496, tl.int64)
    largest, end_bin = _survey(row, vocab, room, BLOCK)
    least = (tl.load(min_ps + n) * largest.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    floor = ((-end_bin + _EXPONENT_OF_1 + 1) << 23) - 1
    size = _gather(row, vocab, candidate_row, id_row, room, floor, BLOCK)
    # A row of NaN has more candidates than the survey says.
    held = (size > 0) & (size <= room)
    source = candidate_row
    total = one
    if held:
        _, total = _above(candidate_row, size, floor, BLOCK)
        by_p = (top_k >= vocab) & (top_p < 1.0) & (_share(top_p, one) <= total)
        by_min_p = (least > floor) & ((top_k >= vocab) | (top_p >= 1.0))
        held = (size >= top_k) | by_p | by_min_p | (end_bin == _WEIGHTLESS)
    if not held:
        source = row
        size = vocab
        floor = 0
        _, total = _above(row, vocab, floor, BLOCK)

    kept = total
    mass = one
    if top_k < vocab:
        mass = _kept_by_top_k(source, size, floor, largest, top_k, total, BLOCK)
        kept = mass
    if top_p < 1.0:
        kept = tl.minimum(
            kept,
            _kept_by_top_p(source, size, floor, largest, tl.maximum(_share(top_p, mass), 1), BLOCK),
        )
    if least > floor:
        _, likely = _above(source, size, least - 1, BLOCK)
        kept = tl.minimum(kept, likely)

    goal = (tl.load(uniforms + n) * kept.to(tl.float64)).to(tl.int64)
    goal = tl.maximum(tl.minimum(goal, kept - 1), 0)
    bits = _lowest(source, size, floor, largest, goal, False, BLOCK)
    _, before = _above(source, size, bits, BLOCK)
    rank = (goal - before) // tl.maximum(_weight(bits.to(tl.float32, bitcast=True)), 1)
    place = _place_of(source, size, bits, rank, BLOCK)
    if held:
        place = tl.load(id_row + place)
    tl.store(drawn + n, place.to(tl.int64))
