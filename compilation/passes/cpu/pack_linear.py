"""Makes linear layers read weights that were packed once for the device's matrix kernels.

Otherwise the kernels would pack them at every call.
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
    """Replaces `linear` by `op(x, weight, bias)` if its weight is bfloat16 and all its readers are
    `linear`. Another reader would need the weight unpacked.
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
    """Return the graph with unpacked weights, and the indices of the inputs that `graph` takes
    packed by `Platform.pack_linear_weight`.
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
    """Whether `user` is a `linear` that reads `node` only as its weight."""
    arguments = [*user.args, *user.kwargs.values()]
    return user.target in LINEAR and [
        place for place, argument in enumerate(arguments) if argument is node
    ] == [1]
