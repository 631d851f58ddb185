"""A product and the collective beside it become one op, so that parts of the one are sent while
others are computed: all_gather then linear, linear then reduce_scatter, and on devices that gain by
it linear then all_reduce.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..context import PassContext
from ..cpu.pack_linear import LINEAR
from ..rewrite import our_op

piecework = torch.ops.piecework


@dataclass(frozen=True, slots=True)
class AsyncTp:
    """Comes behind `sequence_parallel`, which leaves those collectives. A gather that several read
    stays by itself. `reduces`: whether all_reduce is taken in, too.
    """

    reduces: bool = False
    name = "async_tp"

    @property
    def key(self) -> str:
        return self.name + " reduces" * self.reduces

    def __call__(self, graph: fx.Graph, context: PassContext) -> int:
        count = 0
        for node in list(graph.nodes):
            if (linear := _linear(node)) is None:
                continue
            scatters = [user for user in node.users if our_op(user) == "reduce_scatter"]
            if len(node.users) == 1 and scatters:
                (scatter,) = scatters
                _become(scatter, f"{linear}_reduce_scatter", node, scatter.args[1:])
                graph.erase_node(node)
                count += 1
                continue
            reduces = [user for user in node.users if our_op(user) == "all_reduce"]
            if self.reduces and linear == "linear" and len(node.users) == 1 and reduces:
                _become(reduces[0], "linear_all_reduce", node, reduces[0].args[1:])
                graph.erase_node(node)
                count += 1
                continue
            gathers = [each for each in node.args[:2] if _is_gather(each)]
            x: Any = node.args[0]
            if x in gathers and all(len(each.users) == 1 for each in gathers):
                _become(node, f"all_gather_{linear}", node, x.args[1:])
                for gather in gathers:
                    node.replace_input_with(gather, gather.args[0])
                    graph.erase_node(gather)
                count += 1
        return count


def _linear(node: fx.Node) -> str | None:
    """Its name in `fused_collectives`."""
    if our_op(node) == "scaled_linear":
        return "scaled_linear"
    return "linear" if node.op == "call_function" and node.target in LINEAR else None


def _is_gather(node: Any) -> bool:
    return isinstance(node, fx.Node) and our_op(node) == "all_gather"


def _become(node: fx.Node, name: str, linear: fx.Node, group: Any) -> None:
    """Let `node` compute both, and give what it gave. `group`: what the collective names it by."""
    given = [*linear.args, *linear.kwargs.values()]
    if our_op(linear) != "scaled_linear":
        given += [None] * (3 - len(given))
    node.target = getattr(piecework, name).default
    node.args, node.kwargs = (*given, *group), {}
