"""Each rank adds and normalises rows of its own: an all_reduce becomes a reduce_scatter, and what
others than norms read of the rows is gathered behind the norm. The residual stream stays split
from layer to layer.

After "Reducing Activation Recomputation in Large Transformer Models" (Korthikanti et al., 2022).
As many bytes are sent as before, or fewer where the norm's result is quantised; norms and
residuals take a share of the time and the memory.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..context import PassContext
from ..rewrite import our_op

piecework = torch.ops.piecework
_ROW_BY_ROW = {
    "quantize_static": 1,
    "quantize_dynamic": 1,
    **{
        name: operands
        for operands, norm in ((1, "rms_norm"), (2, "add_rms_norm"))
        for name in (norm, f"{norm}_quantize_static", f"{norm}_quantize_dynamic")
    },
}
"""Ops of `kernels.ops` that compute each row by itself, and how many of their arguments have
rows.
"""


@dataclass(frozen=True, slots=True)
class SequenceParallel:
    """For steps whose number of tokens is a multiple of `ranks`, at least twice it: the forward is
    good for no others afterwards. Counts the all_reduces.
    """

    ranks: int
    name = "sequence_parallel"

    @property
    def key(self) -> str:
        return f"{self.name} {self.ranks}"

    def __call__(self, graph: fx.Graph, context: PassContext) -> int:
        split = _split(graph)
        full = {node: node.meta["example_value"] for node in split}
        rows: dict[fx.Node, fx.Node] = {}
        count = 0
        for node in split:
            if our_op(node) == "all_reduce":
                with graph.inserting_before(node):
                    rows[node] = graph.call_function(
                        piecework.reduce_scatter.default, (*node.args, self.ranks)
                    )
                group = node.args[1]
                count += 1
            else:
                node.args = fx.map_arg(node.args, lambda each: rows.get(each, each))
                rows[node] = node
            _infer(rows[node])
        for node in split:
            readers = [user for user in node.users if user not in rows]
            if readers and isinstance(full[node], torch.Tensor):
                with graph.inserting_after(node):
                    gathered = graph.call_function(
                        piecework.all_gather.default, (rows[node], group, self.ranks)
                    )
                gathered.meta["example_value"] = full[node]
                for reader in readers:
                    reader.replace_input_with(node, gathered)
        for node in reversed(split):
            if rows[node] is not node:
                graph.erase_node(node)
        return count


def _split(graph: fx.Graph) -> list[fx.Node]:
    """All of which a rank can have rows of its own: sums that a norm reads, and what is made of
    such rows alone.
    """
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        source: Any = node.args[0] if node.args else None
        operands = _ROW_BY_ROW.get(our_op(node), 0)
        if (
            our_op(node) == "all_reduce"
            or (node.target is operator.getitem and source in found and _several(source))
            or (operands and all(each in found for each in node.args[:operands]))
        ):
            found[node] = None
    # A sum that no norm reads would only be scattered and gathered.
    return [
        node
        for node in found
        if our_op(node) != "all_reduce" or any(user in found for user in node.users)
    ]


def _several(node: fx.Node) -> bool:
    return isinstance(node.meta["example_value"], tuple | list)


def _infer(node: fx.Node) -> None:
    """Gives a node the example value that follows from its arguments'."""
    target: Any = node.target
    node.meta["example_value"] = target(
        *fx.map_arg(node.args, lambda each: each.meta["example_value"])
    )
