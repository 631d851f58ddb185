"""Packed weights whose rows are of several formats: runs of panels, told by a table in front."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate

MOST_RUNS = 8
_MIXED = "mixed "


class PanelRun(ctypes.Structure):
    """`PanelRun` of linear.h."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("panels", "layout")),
        ("offset", ctypes.c_int64),
    ]


def runs_of(kind: str) -> list[tuple[str, int]]:
    """Kinds and rows of "mixed Q4_K 64 Q6_K 32"; nothing of weights of one kind."""
    words = kind.removeprefix(_MIXED).split() if kind.startswith(_MIXED) else []
    return [(each, int(rows)) for each, rows in zip(words[::2], words[1::2], strict=True)]


def offsets_of(sizes: Sequence[int]) -> list[int]:
    """Where each run begins, and where the last ends, in bytes, of runs of so many."""
    return list(accumulate(sizes, initial=MOST_RUNS * ctypes.sizeof(PanelRun)))
