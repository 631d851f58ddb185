"""ALiBi (arXiv:2108.12409): heads know no positions, and favour near keys, each by a slope."""

from __future__ import annotations

from math import ceil, log2


def alibi_slope(head: int, heads: int, steepest: float = 8.0) -> float:
    """Return the slope of a head of `heads`, as `KVLayout` has it: powers of two, evenly spaced
    down to 2^-`steepest`.

    If `heads` is no power of two, the slopes are every other one of the next larger power, and
    behind these as many of the others as there are heads left.
    """
    count = 2 ** ceil(log2(heads))
    number = head + 1
    if count > heads:
        number = 2 * number if head < count // 2 else 2 * number - count - 1
    return float(2.0 ** (-steepest * number / count))
