"""Chooses the numbers of tokens to capture: the default list, a list of the user, or the best sizes
for recorded lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

FLAG = "--piecewise-cuda-graph-tokens"
# First, last and distance of SGLang's default sizes. From 4096 on, the distance is 512.
_STEPS = ((4, 32, 4), (48, 256, 16), (288, 512, 32), (576, 1024, 64), (1280, 4096, 256))
# The same for its batch sizes of decodes, after 1, 2, 4, 8 and 12. From 512 on, the distance is 32.
_DECODE_STEPS = ((16, 256, 8), (272, 512, 16))

Histogram = Mapping[int, int]  # Maps numbers of tokens to counts of steps.


class SizesOption(NamedTuple):
    """The value of the flag: a list of sizes, or how many to choose.

    Neither means the default list.
    """

    given: tuple[int, ...] | None = None
    auto: int | None = None


def parse_sizes(text: str | None) -> SizesOption:
    """Parse "16,64,256", "auto:8" or None. Raise `ValueError` with a remedy."""
    if text is None:
        return SizesOption()
    if not text.startswith("auto:"):
        return SizesOption(given=parse_list(text, FLAG, "numbers of tokens (16,64,256) or auto:K"))
    count = text.removeprefix("auto:")
    if not count.isascii() or not count.isdigit() or int(count) < 1:
        raise ValueError(
            f"{FLAG} takes numbers of tokens (16,64,256) or auto:K, K at least 1, got {text!r}"
        )
    return SizesOption(auto=int(count))


def parse_list(text: str, flag: str, takes: str) -> tuple[int, ...]:
    """Parse numbers of at least 1, sorted, without duplicates.

    Raise `ValueError` that says what `flag` takes.
    """
    parts = text.replace(",", " ").split()
    if not parts or not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"{flag} takes {takes}, got {text!r}")
    return tuple(sorted({int(part) for part in parts}))


def default_sizes(cap: int) -> list[int]:
    """Return SGLang's sizes up to `cap` tokens, and `cap` itself."""
    steps = (size for first, last, step in _STEPS for size in range(first, last + 1, step))
    sizes = [size for size in (*steps, *range(4096 + 512, cap + 1, 512)) if size <= cap]
    return sizes if sizes and sizes[-1] == cap else [*sizes, cap]


def decode_sizes(cap: int) -> list[int]:
    """Return SGLang's batch sizes of decode graphs up to `cap` requests, and `cap` itself."""
    steps = (size for first, last, step in _DECODE_STEPS for size in range(first, last + 1, step))
    sizes = [
        size for size in (1, 2, 4, 8, 12, *steps, *range(512 + 32, cap + 1, 32)) if size <= cap
    ]
    return sizes if sizes[-1] == cap else [*sizes, cap]


def choose_sizes(option: SizesOption, cap: int, seen: Histogram) -> list[int]:
    """Return the sizes to capture, up to `cap`.

    auto:K chooses the best sizes for the lengths `seen`. If there are none, it thins the default
    list.
    """
    if option.given is not None:
        return [size for size in option.given if size <= cap]
    if option.auto is None:
        return default_sizes(cap)
    short = {length: count for length, count in seen.items() if 0 < length <= cap and count > 0}
    return best_sizes(short, option.auto) if short else thin(default_sizes(cap), option.auto)


def padding(sizes: Sequence[int], seen: Histogram) -> int:
    """Return the tokens of padding if each length is padded to the next of `sizes`.

    Lengths above the largest size are not padded.
    """
    ordered = sorted(sizes)
    wasted = 0
    for length, count in seen.items():
        size = next((size for size in ordered if size >= length), length)
        wasted += (size - length) * count
    return wasted


def padding_share(sizes: Sequence[int], seen: Histogram) -> float:
    """Return padding as a share of all computed tokens, or 0 if no lengths were seen."""
    wasted = padding(sizes, seen)
    real = sum(length * count for length, count in seen.items())
    return wasted / (wasted + real) if real else 0.0


def best_sizes(seen: Histogram, count: int) -> list[int]:
    """Return at most `count` sizes that cover all lengths of `seen` with the least padding.

    The sizes are among the lengths seen, because a size in a gap can be lowered to the next length
    below. The algorithm is dynamic programming over the sorted lengths. The cost of a range
    satisfies the quadrangle inequality, so the best last cut is monotone, and divide and conquer
    does each round in O(n log n) (Galil and Park, Theoretical Computer Science 92, 1992).
    """
    lengths = sorted(seen)
    weights = [0, *accumulate(seen[length] for length in lengths)]
    masses = [0, *accumulate(seen[length] * length for length in lengths)]

    def cost(start: int, stop: int) -> int:
        """Return the padding of lengths [start, stop) to the last of them."""
        return lengths[stop - 1] * (weights[stop] - weights[start]) - (masses[stop] - masses[start])

    ends = len(lengths)
    rounds = [[0 if stop == 0 else cost(0, stop) for stop in range(ends + 1)]]
    cuts: list[list[int]] = []
    for _ in range(1, min(count, ends)):
        best, cut = rounds[-1].copy(), [0] * (ends + 1)
        pending = [(1, ends, 0, ends - 1)]
        while pending:
            low, high, first, last = pending.pop()
            if low > high:
                continue
            stop = (low + high) // 2
            best[stop], cut[stop] = min(
                (rounds[-1][start] + cost(start, stop), start)
                for start in range(first, min(last, stop - 1) + 1)
            )
            pending += [(low, stop - 1, first, cut[stop]), (stop + 1, high, cut[stop], last)]
        rounds.append(best)
        cuts.append(cut)
    sizes, stop = [lengths[ends - 1]], ends
    for cut in reversed(cuts):
        stop = cut[stop]
        if stop == 0:
            break
        sizes.append(lengths[stop - 1])
    return sorted(sizes)


def thin(sizes: Sequence[int], count: int) -> list[int]:
    """Return at most `count` of `sizes`, spread evenly over the list, with the largest."""
    ordered = sorted(set(sizes))
    if count >= len(ordered):
        return ordered
    last = len(ordered) - 1
    return sorted({ordered[last - (index * len(ordered)) // count] for index in range(count)})


def within_budget(sizes: Sequence[int], graphs_per_size: int, budget: int | None) -> list[int]:
    """Return `sizes`, thinned until their graphs are within a platform's budget."""
    return sorted(set(sizes)) if budget is None else thin(sizes, budget // max(1, graphs_per_size))
