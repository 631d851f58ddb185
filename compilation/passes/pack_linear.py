"""Projections read weights that were laid out once for the device's matrix kernels, instead of
laying them out at every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import fx
from torch.nn import functional as F

from ..shapes import TensorSpec

_LINEAR = {F.linear, torch.ops.aten.linear.default}


class PackedGraph(NamedTuple):
    """A piece's graph, and which of its inputs it takes packed, as `Platform.pack_linear_weight`
    does.
    """

    graph: fx.Graph
    packed: tuple[int, ...]


def pack_linear(
    graph: fx.Graph, inputs: Sequence[TensorSpec], op: torch._ops.OpOverload
) -> PackedGraph:
    """A copy of `graph` in which `op(x, weight, bias)` takes the place of every `linear` on a
    bfloat16 weight.

    Only weights that nothing else of the piece reads: another reader would need them as they were.
    """
    places = {node: number for number, node in enumerate(graph.find_nodes(op="placeholder"))}
    packed = [number for node, number in places.items() if _can_be_packed(node, inputs[number])]
    copy = fx.Graph()
    inner: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        inner[node] = copy.node_copy(node, inner.__getitem__)
        if any(
            _is_weight_of(source, node) and places.get(source) in packed
            for source in node.all_input_nodes
        ):
            inner[node].target = op
            inner[node].args = (*inner[node].args, *inner[node].kwargs.values())
            inner[node].kwargs = {}
    return PackedGraph(copy, tuple(packed))


def _can_be_packed(node: fx.Node, spec: TensorSpec) -> bool:
    is_matrix = spec.weight and spec.dtype == "bfloat16" and len(spec.shape) == 2
    return is_matrix and bool(node.users) and all(_is_weight_of(node, user) for user in node.users)


def _is_weight_of(node: fx.Node, user: fx.Node) -> bool:
    """Whether `user` is a `linear` that reads `node` as its weight, and as nothing else."""
    arguments = [*user.args, *user.kwargs.values()]
    return user.target in _LINEAR and [
        place for place, argument in enumerate(arguments) if argument is node
    ] == [1]
