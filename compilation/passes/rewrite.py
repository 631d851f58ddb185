"""Plain functions over tensors, written into a traced graph: each op a node with the example value
of what it gives (`node.meta["example_value"]`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.proxy import GraphAppendingTracer

from ..core.errors import TraceError


def inline(
    graph: fx.Graph,
    before: fx.Node,
    function: Callable[..., Any],
    arguments: Sequence[Any],
    keywords: Mapping[str, Any] | None = None,
) -> list[fx.Node]:
    """What `function` does to `arguments` (a node stands for a tensor), as nodes before another
    one; returns those of its results.
    """
    tracer = _Inliner(graph)
    args, kwargs = fx.map_arg((tuple(arguments), dict(keywords or {})), tracer.proxy)  # type: ignore[arg-type]
    with graph.inserting_before(before):
        results: Any = function(*args, **kwargs)
        if isinstance(results, fx.Proxy):
            several = isinstance(results.node.meta["example_value"], tuple)
            results = tuple(iter(results)) if several else (results,)
    nodes = [result.node for result in results]
    for node in reversed(tracer.created):
        if node.target == "size" and not node.users:
            graph.erase_node(node)
    return nodes


def replace(old: fx.Node, new: fx.Node) -> None:
    """Let the readers of `old` read `new`. They were traced for its strides: raises `TraceError`
    where `new` has others.
    """
    if layout(old) != layout(new):
        raise TraceError(f"{old.target} has another layout than {new.target} in its place")
    old.replace_all_uses_with(new)


def layout(node: fx.Node) -> tuple[Any, ...]:
    """Shape, strides, place and type of the tensor that a node gives. To be compared: that makes
    no assumption on the number of tokens.
    """
    value = node.meta["example_value"]
    numbers = (*value.shape, *value.stride(), value.storage_offset())
    exact = [n.node.expr if isinstance(n, torch.SymInt) else n for n in numbers]
    return *exact, value.dtype, value.device


def op_name(node: fx.Node) -> str:
    """What a call calls, in the same short word for functions, methods and ops."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.rpartition("::")[2]
    return target if isinstance(target, str) else getattr(target, "__name__", "")


def our_op(node: fx.Node) -> str:
    """`op_name` of a call of an op of ours; empty for other nodes."""
    return op_name(node) if str(node.target).startswith("piecework.") else ""


class _Inliner(GraphAppendingTracer):
    """Appends to a traced graph."""

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__(graph)
        self.created: list[fx.Node] = []

    def create_node(self, kind: str, target: Any, *rest: Any, **named: Any) -> fx.Node:
        node = super().create_node(kind, target, *rest, **named)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["example_value"])
        function = getattr(torch.Tensor, target) if kind == "call_method" else target
        node.meta["example_value"] = function(*args, **kwargs)
        self.created.append(node)
        return node

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)


class _Value(fx.Proxy):
    """A tensor that is being computed, whose shape is known."""

    @property
    def shape(self) -> tuple[Any, ...]:
        """Numbers, and nodes for what depends on the number of tokens."""
        sizes = self.node.meta["example_value"].shape
        return tuple(
            size if isinstance(size, int) else self.size(axis) for axis, size in enumerate(sizes)
        )

    def __iter__(self) -> Iterator[Any]:
        parts = range(len(self.node.meta["example_value"]))
        return (operator.getitem(self, number) for number in parts)
