"""Elementwise ops, and sums over ranks, write over an input that nobody needs any more, instead of
into new memory. It comes after `lower`, since it is plain torch that has in-place forms, and is for
pieces that run as they were traced: a compiler that fuses reuses memory itself.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ....kernels import collectives
from ...core.split_ops import split_op_name
from ..context import PassContext
from ..rewrite import layout, op_name, our_op

_FORMS = {
    "add": "add_",
    "sub": "sub_",
    "mul": "mul_",
    "truediv": "div_",
    "clamp": "clamp_",
    "round": "round_",
}
_EITHER = {"add", "mul"}
"""Whose operands may change places."""
_CASTS = {"to", "float", "half", "bfloat16", "double"}
_FRESH = {*_FORMS, "linear", "rms_norm", "silu", "roll", "cat", "abs", "amax"}
"""Ops that give memory of their own, as all of `piecework` but attention do; views do not, and of
in-place forms those whose source nobody reads any more.
"""


class InPlace:
    name = key = "in_place"

    def __call__(self, graph: fx.Graph, context: PassContext) -> int:
        count, piece = 0, 0
        pieces: dict[fx.Node, int] = {}
        for node in graph.nodes:
            piece += split_op_name(node.target) is not None
            pieces[node] = piece
            name = op_name(node)
            if our_op(node) == "all_reduce" and _may_be_overwritten(node.args[0], node, pieces):
                node.target = collectives.IN_PLACE
                count += 1
            if name not in _FORMS or node.kwargs.keys() - {"min", "max"}:
                continue
            for source in node.args[: 2 if name in _EITHER else 1]:
                if isinstance(source, fx.Node) and _may_be_overwritten(source, node, pieces):
                    others = [each for each in node.args if each is not source]
                    node.op, node.target = "call_method", _FORMS[name]
                    node.args = (source, *others)
                    count += 1
                    break
        return count


def _may_be_overwritten(source: Any, node: fx.Node, pieces: dict[fx.Node, int]) -> bool:
    """Whether `source` ends with `node`, is of the same piece, and fits what `node` gives."""
    return (
        isinstance(source.meta["example_value"], torch.Tensor)
        and pieces[source] == pieces[node]
        and node.args.count(source) == 1
        and _ends_with(source, node)
        and layout(source) == layout(node)
    )


def _ends_with(source: fx.Node, node: fx.Node) -> bool:
    """Whether `node` is the last that reads `source`, which is memory without views."""
    return _is_fresh(source) and all(
        user is node or (user < node and _is_fresh(user)) for user in source.users
    )


def _is_fresh(node: fx.Node) -> bool:
    """Whether a node gives memory of its own, of which nothing else is a view."""
    if not node.op.startswith("call"):
        return False
    source = node.args[0] if node.args else None
    if node.target is operator.getitem and isinstance(source, fx.Node):
        return isinstance(source.meta["example_value"], tuple) and _is_ours(source)
    if op_name(node) in _CASTS and isinstance(source, fx.Node):
        return bool(source.meta["example_value"].dtype != node.meta["example_value"].dtype)
    if op_name(node) in _FORMS.values() and isinstance(source, fx.Node):
        return _ends_with(source, node)
    return op_name(node) in _FRESH or _is_ours(node)


def _is_ours(node: fx.Node) -> bool:
    is_op = isinstance(node.target, torch._ops.OpOverload)
    return is_op and str(node.target).startswith("piecework.") and not split_op_name(node.target)
