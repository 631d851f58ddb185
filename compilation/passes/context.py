"""The input of passes besides the graph."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True, slots=True)
class PassContext:
    """`weights`: the placeholders that stand for parameters and buffers."""

    weights: frozenset[fx.Node]
