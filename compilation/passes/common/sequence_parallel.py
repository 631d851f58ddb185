"""Splits the rows of norms and residuals over ranks.

An all_reduce becomes a reduce_scatter, so each rank adds and normalises its own rows. The result of
a norm is gathered for ops other than norms. The residual stream stays split between layers.

After "Reducing Activation Recomputation in Large Transformer Models" (Korthikanti et al., 2022).
The ranks send as many bytes as before, or fewer if the norm's result is quantised. Each rank needs
only its share of the time and memory of norms and residuals.
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
# Ops of `kernels.ops` that compute each row separately, with the number of arguments that have
# rows.
_ROW_BY_ROW = {
    "quantize_static": 1,
    "quantize_dynamic": 1,
    "quantize_fp4": 1,
    **{
        name: operands
        for operands, norm in ((1, "rms_norm"), (2, "add_rms_norm"))
        for name in (norm, *(f"{norm}_quantize_{how}" for how in ("static", "dynamic", "fp4")))
    },
}


@dataclass(frozen=True, slots=True)
class SequenceParallel:
    """Splits rows over `ranks`. Returns the number of replaced all_reduces.

    The changed forward supports only numbers of tokens that are a multiple of `ranks`, at least
    twice `ranks`.
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
                node.args = fx.map_arg(node.args, lambda arg: rows.get(arg, arg))
                rows[node] = node
            target: Any = rows[node].target
            rows[node].meta["example_value"] = target(
                *fx.map_arg(rows[node].args, lambda arg: arg.meta["example_value"])
            )
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
    """Return the nodes whose rows can be split: sums that a norm reads, and row-wise ops on nodes
    whose rows are split.
    """
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        source: Any = node.args[0] if node.args else None
        operands = _ROW_BY_ROW.get(our_op(node), 0)
        if (
            our_op(node) == "all_reduce"
            or (
                node.target is operator.getitem
                and source in found
                and isinstance(source.meta["example_value"], tuple | list)
            )
            or (operands and all(arg in found for arg in node.args[:operands]))
        ):
            found[node] = None
    # Without a norm that reads it, a sum would only be scattered and gathered again.
    return [
        node
        for node in found
        if our_op(node) != "all_reduce" or any(user in found for user in node.users)
    ]
