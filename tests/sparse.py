"""Parameters of which the default run takes a few, because the others repeat what they show."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import product
from typing import Any

import pytest


def sparse(values: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """Return `values` as parameters, of which those that are not in `kept` are marked slow.

    A tuple is the values of several arguments.
    """
    values = list(values)
    missing = [each for each in kept if each not in values]
    assert not missing, f"{missing} are not among the values"
    return [
        pytest.param(
            *(each if isinstance(each, tuple) else (each,)),
            marks=[] if each in kept else [pytest.mark.slow],
        )
        for each in values
    ]


def diagonal(*axes: Collection[Any]) -> list[Any]:
    """Return the product of `axes` as parameters of several arguments.

    The default run has as many of them as the longest axis has values, and each value of each axis
    at least once. The others are marked slow.
    """
    values = [list(axis) for axis in axes]
    length = max(map(len, values))
    kept = {tuple(place % len(axis) for axis in values) for place in range(length)}
    return [
        pytest.param(
            *(axis[place] for axis, place in zip(values, places, strict=True)),
            marks=[] if places in kept else [pytest.mark.slow],
        )
        for places in product(*(range(len(axis)) for axis in values))
    ]
