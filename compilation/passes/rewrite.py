"""Writes functions of tensors into a traced graph.

Each op becomes a node with the example value of its result (`node.meta["example_value"]`).
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
    """Insert the ops of `function` on `arguments` before a node. Return the nodes of its results.

    An argument that is a node is a tensor.
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
    """Replace `old` by `new` in all nodes that read it.

    They were traced for its strides, so raise `TraceError` if `new` has another layout.
    """
    if layout(old) != layout(new):
        raise TraceError(f"{old.target} has another layout than {new.target} in its place")
    old.replace_all_uses_with(new)


def layout(node: fx.Node) -> tuple[Any, ...]:
    """Return shape, strides, offset, dtype and device of a node's tensor.

    Two layouts can be compared without a guard on the number of tokens.
    """
    value = node.meta["example_value"]
    numbers = (*value.shape, *value.stride(), value.storage_offset())
    exact = [n.node.expr if isinstance(n, torch.SymInt) else n for n in numbers]
    return *exact, value.dtype, value.device


def op_name(node: fx.Node) -> str:
    """Return the short name of the function, method or op that a node calls."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.rpartition("::")[2]
    return target if isinstance(target, str) else getattr(target, "__name__", "")


def our_op(node: fx.Node) -> str:
    """Return the `op_name` of a `piecework` op, or an empty text for other nodes."""
    return op_name(node) if str(node.target).startswith("piecework.") else ""


class _Inliner(GraphAppendingTracer):
    """Appends nodes with example values to a traced graph."""

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
    """The proxy of a tensor whose shape is known."""

    @property
    def shape(self) -> tuple[Any, ...]:
        """The sizes. Those that depend on the number of tokens are proxies."""
        sizes = self.node.meta["example_value"].shape
        return tuple(
            size if isinstance(size, int) else self.size(axis) for axis, size in enumerate(sizes)
        )

    def __iter__(self) -> Iterator[Any]:
        parts = range(len(self.node.meta["example_value"]))
        return (operator.getitem(self, number) for number in parts)
