"""Removes ops that return their input unchanged: views to the same shape, casts to the same dtype,
and slices of everything. Two casts with a wider dtype between them become one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..context import PassContext
from ..rewrite import layout, op_name

_VIEWS = {"view", "reshape", "flatten", "unflatten", "squeeze", "expand", "contiguous", "narrow"}
_CASTS = {"to", "float", "half", "bfloat16", "double", "type"}
_NARROW = {torch.bfloat16, torch.float16}
_WIDE = {torch.float32, torch.float64}  # They represent all numbers of the narrow dtypes.


class Noop:
    """The pass. Returns the number of removed ops."""

    name = key = "noop"

    def __call__(self, graph: fx.Graph, context: PassContext) -> int:
        count = 0
        for node in list(graph.nodes):
            source = _source(node)
            if source is not None and _is_cast(node) and _is_detour(source, node):
                node.replace_input_with(source, source.args[0])
                if not source.users:
                    graph.erase_node(source)
                source = _source(node)
                count += 1
            if source is not None and layout(source) == layout(node):
                node.replace_all_uses_with(source)
                graph.erase_node(node)
                count += 1
        return count


def _source(node: fx.Node) -> fx.Node | None:
    """Return the input of a view, cast or slice, or None for other ops."""
    if not node.op.startswith("call") or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    source, name = node.args[0], op_name(node)
    if name == "getitem":
        index: Any = node.args[1]
        parts = index if isinstance(index, tuple) else (index,)
        known = all(isinstance(part, slice) or part is Ellipsis for part in parts)
    else:
        known = name in _VIEWS or _is_cast(node)
    tensor = isinstance(source.meta.get("example_value"), torch.Tensor)
    return source if known and tensor else None


def _is_cast(node: fx.Node) -> bool:
    return node.op.startswith("call") and op_name(node) in _CASTS


def _is_detour(source: fx.Node, node: fx.Node) -> bool:
    """Whether `source` is a cast from a narrow to a wide dtype, and `node` a cast to a third dtype.

    If `node` only moves the tensor to another device, the dtype stays, and `source` is needed.
    """
    before = _source(source) if _is_cast(source) else None
    if before is None:
        return False
    was, through, now = (cast.meta["example_value"].dtype for cast in (before, source, node))
    return through in _WIDE and was in _NARROW and now != through
