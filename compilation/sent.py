"""Counts the bytes that the collectives of a traced forward send."""

from __future__ import annotations

from typing import Any

from torch import fx

from .passes.rewrite import our_op
from .shapes import TokenShapes


def bytes_sent(graph: fx.Graph, shapes: TokenShapes, ranks: int) -> float:
    """Return the bytes that each rank sends per token of a step.

    Of n bytes, a gather or a scatter sends all but the rank's own part, n (1 - 1 / ranks). An
    all_reduce is a scatter and a gather. No algorithm sends less (Patarasuk and Yuan, Journal of
    Parallel and Distributed Computing 69, 2009).
    """

    def size(node: Any) -> float:
        value = node.meta["example_value"]
        extent = shapes.extent(value.numel() * value.itemsize)
        return extent.per_unit / extent.unit

    total = 0.0
    for node in graph.nodes:
        op = our_op(node)
        if op == "linear_all_reduce":
            total += 2 * size(node)
        elif op.startswith("all_reduce"):
            total += 2 * size(node.args[0])
        elif op == "reduce_scatter":
            total += size(node.args[0])
        elif op == "all_gather":
            total += size(node)
        elif op.endswith("linear_reduce_scatter"):
            total += ranks * size(node)
        elif op.startswith("all_gather_"):
            scale: Any = node.args[1]
            by_row = op.endswith("scaled_linear") and scale.meta["example_value"].dim() == 2
            total += ranks * sum(map(size, node.args[: 2 if by_row else 1]))
    return total * (ranks - 1) / ranks
