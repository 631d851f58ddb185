"""ALiBi (arXiv:2108.12409): scores fall with the distance of a key, by a slope for each head."""

from __future__ import annotations

from math import ceil, log2


def alibi_slope(head: int, heads: int, steepest: float = 8.0) -> float:
    """Return the slope of head number `head`: powers of two, evenly spaced down to 2^-`steepest`.

    If `heads` is not a power of two, the slopes of the next power of two are used: first every
    second slope, then as many of the remaining slopes as there are heads left.
    """
    count = 2 ** ceil(log2(heads))
    number = head + 1
    if count > heads:
        number = 2 * number if head < count // 2 else 2 * number - count - 1
    return float(2.0 ** (-steepest * number / count))
