"""Fuses a matrix product with the collective before or after it.

The fused op sends parts of the result while it computes others. Fused are all_gather then linear,
linear then reduce_scatter, and on some devices linear then all_reduce.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ....kernels.fused_collectives import PRODUCTS, Product
from ..context import PassContext
from ..rewrite import our_op

piecework = torch.ops.piecework


@dataclass(frozen=True, slots=True)
class AsyncTp:
    """Runs after `sequence_parallel`, which inserts these collectives.

    A gather with several readers is not fused. `reduces` says whether all_reduce is fused too.
    """

    reduces: bool = False
    name = "async_tp"

    @property
    def key(self) -> str:
        return self.name + " reduces" * self.reduces

    def __call__(self, graph: fx.Graph, context: PassContext) -> int:
        count = 0
        for node in list(graph.nodes):
            if (product := _product(node)) is None:
                continue
            scatters = [user for user in node.users if our_op(user) == "reduce_scatter"]
            if len(node.users) == 1 and scatters:
                (scatter,) = scatters
                _fuse(scatter, f"{product.name}_reduce_scatter", product, node, scatter.args[1:])
                graph.erase_node(node)
                count += 1
                continue
            reduces = [user for user in node.users if our_op(user) == "all_reduce"]
            if self.reduces and product.name == "linear" and len(node.users) == 1 and reduces:
                _fuse(reduces[0], "linear_all_reduce", product, node, reduces[0].args[1:])
                graph.erase_node(node)
                count += 1
                continue
            gathers = [
                arg
                for arg in node.args[: 2 if product.scaled else 1]
                if isinstance(arg, fx.Node) and our_op(arg) == "all_gather"
            ]
            x: Any = node.args[0]
            if x in gathers and all(len(gather.users) == 1 for gather in gathers):
                _fuse(node, f"all_gather_{product.name}", product, node, x.args[1:])
                for gather in gathers:
                    node.replace_input_with(gather, gather.args[0])
                    graph.erase_node(gather)
                count += 1
        return count


def _product(node: fx.Node) -> Product | None:
    """Return the linear op of a node, if it has fused ops."""
    return PRODUCTS.get(node.target) if node.op == "call_function" else None


def _fuse(node: fx.Node, name: str, product: Product, linear: fx.Node, group: Any) -> None:
    """Turn `node` into the fused op, with the same result.

    `group` are the collective's arguments.
    """
    given = [*linear.args, *linear.kwargs.values()]
    given += [None] * (product.arguments - len(given))  # A bias that is left out.
    node.target = getattr(piecework, name).default
    node.args, node.kwargs = (*given, *group), {}
