"""Makes elementwise ops and sums over ranks overwrite an input that is not needed any more.

The pass runs after `lower`, because plain torch ops have in-place forms. It is for pieces that run
as traced: a compiler that fuses reuses memory itself.
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
_COMMUTATIVE = {"add", "mul"}
_CASTS = {"to", "float", "half", "bfloat16", "double"}
# Ops that return new memory. So do all `piecework` ops except attention. Views do not. In-place
# forms do if their source has no other reader afterwards.
_FRESH = {*_FORMS, "linear", "rms_norm", "silu", "roll", "cat", "abs", "amax"}


class InPlace:
    """The pass. Returns the number of changed ops."""

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
            for source in node.args[: 2 if name in _COMMUTATIVE else 1]:
                if isinstance(source, fx.Node) and _may_be_overwritten(source, node, pieces):
                    others = [arg for arg in node.args if arg is not source]
                    node.op, node.target = "call_method", _FORMS[name]
                    node.args = (source, *others)
                    count += 1
                    break
        return count


def _may_be_overwritten(source: Any, node: fx.Node, pieces: dict[fx.Node, int]) -> bool:
    """Whether `node` is the last reader of `source`, in the same piece, and has its layout."""
    return (
        isinstance(source.meta["example_value"], torch.Tensor)
        and pieces[source] == pieces[node]
        and node.args.count(source) == 1
        and _ends_with(source, node)
        and layout(source) == layout(node)
    )


def _ends_with(source: fx.Node, node: fx.Node) -> bool:
    """Whether `node` is the last reader of `source`, whose memory has no views."""
    return _is_fresh(source) and all(
        user is node or (user < node and _is_fresh(user)) for user in source.users
    )


def _is_fresh(node: fx.Node) -> bool:
    """Whether a node returns new memory without other views."""
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
