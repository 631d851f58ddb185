"""Which adapter (LoRA) each request of a load names."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import cycle, islice


def choose_adapters(
    names: Sequence[str], count: int, zipf: float | None, seed: int
) -> list[str | None]:
    """Return the adapter of each of `count` requests: the names in turn, or drawn by Zipf's law.

    With the exponent `zipf`, number k of the names has a share in proportion to 1 / k ** zipf. The
    draws have a generator of their own, so that prompts do not depend on them.
    """
    if not names:
        return [None] * count
    if zipf is None:
        return list(islice(cycle(names), count))
    shares = [(place + 1) ** -zipf for place in range(len(names))]
    return list(random.Random(seed).choices(names, shares, k=count))
