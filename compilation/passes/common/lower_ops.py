"""Ops of ours become plain torch where a compiler is to look into them, or no kernel computes
them. The last pass.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.proxy import GraphAppendingTracer

from ....kernels import reference
from ...errors import TraceError
from ..context import PassContext


@dataclass(frozen=True, slots=True)
class LowerOps:
    """Puts the definition of `piecework::name` (`kernels.reference`) in its place, for each of
    `names`.
    """

    names: tuple[str, ...]
    name = "lower_ops"

    @property
    def key(self) -> str:
        return f"lower_ops {' '.join(self.names)}"

    def __call__(self, graph: fx.Graph, context: PassContext) -> int:
        count = 0
        for node in list(graph.nodes):
            namespace, _, op = str(node.target).partition(".")
            name = op.removesuffix(".default")
            if namespace == "piecework" and name in self.names:
                _inline(graph, node, getattr(reference, name))
                count += 1
        return count


def _inline(graph: fx.Graph, node: fx.Node, definition: Any) -> None:
    arguments: Any = fx.map_arg(node.args, _Inliner(graph).proxy)  # type: ignore[arg-type]
    with graph.inserting_before(node):
        result = definition(*arguments, **node.kwargs)
    if isinstance(result, tuple):
        for user in list(node.users):
            place: Any = user.args[1]
            assert user.target is operator.getitem
            _replace(graph, user, result[place].node)
        graph.erase_node(node)
    else:
        _replace(graph, node, result.node)


def _replace(graph: fx.Graph, node: fx.Node, by: fx.Node) -> None:
    """What comes after was traced for the strides of the op, so its definition must give them."""
    old, new = node.meta["example_value"], by.meta["example_value"]
    if (old.shape, old.stride(), old.dtype) != (new.shape, new.stride(), new.dtype):
        raise TraceError(f"{node.target} gives another layout than its definition")
    node.replace_all_uses_with(by)
    graph.erase_node(node)


class _Inliner(GraphAppendingTracer):
    """Appends to a traced graph, with an example value for each new node."""

    def create_node(self, kind: str, target: Any, *rest: Any, **named: Any) -> fx.Node:
        node = super().create_node(kind, target, *rest, **named)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["example_value"])
        function = getattr(torch.Tensor, target) if kind == "call_method" else target
        node.meta["example_value"] = function(*args, **kwargs)
        return node

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)


class _Value(fx.Proxy):
    """A tensor that is being computed, whose shape is known."""

    @property
    def shape(self) -> torch.Size:
        shape: torch.Size = self.node.meta["example_value"].shape
        return shape

    def __iter__(self) -> Iterator[Any]:
        parts = range(len(self.node.meta["example_value"]))
        return (operator.getitem(self, number) for number in parts)
