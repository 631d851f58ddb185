"""Which part of a model a rank holds."""

from __future__ import annotations

from typing import NamedTuple


class Shard(NamedTuple):
    """Part `rank` of `size`, of each layer that is split."""

    rank: int = 0
    size: int = 1


WHOLE = Shard()
