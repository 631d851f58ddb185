"""Replaces `piecework` ops by plain torch if a compiler fuses them, or if there is no kernel."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from torch import fx

from ....kernels import ops, reference
from ..context import PassContext
from ..rewrite import inline, replace


@dataclass(frozen=True, slots=True)
class Lower:
    """Replaces `piecework::name` by its definition in `kernels.reference`, for each of `names`.

    Also replaces other ops whose kernel on `device_type` does not support the node's dtype.
    """

    names: tuple[str, ...]
    device_type: str
    name = "lower"

    @property
    def key(self) -> str:
        return " ".join([self.name, *self.names])

    def __call__(self, graph: fx.Graph, context: PassContext) -> int:
        count = 0
        for node in list(graph.nodes):
            namespace, _, op = str(node.target).partition(".")
            name = op.removesuffix(".default")
            if namespace == "piecework" and (name in self.names or self._is_refused(node, name)):
                new = inline(graph, node, getattr(reference, name), node.args, node.kwargs)
                if len(new) == 1:
                    replace(node, new[0])
                for part in [] if len(new) == 1 else list(node.users):
                    place: Any = part.args[1]
                    assert part.target is operator.getitem
                    replace(part, new[place])
                    graph.erase_node(part)
                graph.erase_node(node)
                count += 1
        return count

    def _is_refused(self, node: fx.Node, name: str) -> bool:
        if name not in ops.TRACED or name in ops.PRODUCTS:
            return False
        x: Any = node.args[0]
        dtype = x.meta["example_value"].dtype
        return ops.has_kernel(self.device_type, name) and not ops.has_kernel(
            self.device_type, name, dtype
        )
