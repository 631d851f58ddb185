"""Packed weights whose rows have several formats: runs of panels with a table in front."""

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
    """Return kinds and rows of "mixed Q4_K 64 Q6_K 32", or an empty list for a weight of
    one kind.
    """
    words = kind.removeprefix(_MIXED).split() if kind.startswith(_MIXED) else []
    return [(each, int(rows)) for each, rows in zip(words[::2], words[1::2], strict=True)]


def offsets_of(sizes: Sequence[int]) -> list[int]:
    """Return where each run begins and where the last ends, in bytes, from the sizes of
    the runs.
    """
    return list(accumulate(sizes, initial=MOST_RUNS * ctypes.sizeof(PanelRun)))
