"""Projections read weights that were laid out once for the device's matrix kernels, instead of
laying them out at every call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx
from torch.nn import functional as F

from ..context import PassContext

LINEAR = {F.linear, torch.ops.aten.linear.default}


@dataclass(frozen=True, slots=True)
class PackLinear:
    """`op(x, weight, bias)` takes the place of every `linear` on a bfloat16 weight that nothing
    else reads: another reader would need it as it was.
    """

    op: torch._ops.OpOverload
    name = "pack_linear"
    key = "pack_linear"

    def __call__(self, graph: fx.Graph, context: PassContext) -> int:
        count = 0
        for weight in context.weights:
            value = weight.meta["example_value"]
            if value.dtype != torch.bfloat16 or value.dim() != 2:
                continue
            readers = list(weight.users)
            if all(_is_weight_of(weight, reader) for reader in readers):
                for reader in readers:
                    reader.target = self.op
                    reader.args = (*reader.args, *reader.kwargs.values())
                    reader.kwargs = {}
                count += len(readers)
        return count


def unpacked(graph: fx.Graph) -> tuple[fx.Graph, tuple[int, ...]]:
    """A piece on weights as the model has them, and which of its inputs `graph` takes packed, as
    `Platform.pack_linear_weight` does.
    """
    places = {node: number for number, node in enumerate(graph.find_nodes(op="placeholder"))}
    copy = fx.Graph()
    inner: dict[fx.Node, fx.Node] = {}
    packed = set()
    for node in graph.nodes:
        inner[node] = copy.node_copy(node, inner.__getitem__)
        if str(node.target) == "piecework.packed_linear.default":
            inner[node].target = F.linear
            packed.add(places[node.args[1]])
    return copy, tuple(sorted(packed))


def _is_weight_of(node: fx.Node, user: fx.Node) -> bool:
    """Whether `user` is a `linear` that reads `node` as its weight, and as nothing else."""
    arguments = [*user.args, *user.kwargs.values()]
    return user.target in LINEAR and [
        place for place, argument in enumerate(arguments) if argument is node
    ] == [1]
