"""Fusions: passes that replace a sequence of ops by one op.

`torch.fx.passes.utils.matcher_utils.SubgraphMatcher` finds the ops. `rewrite` inserts the new op,
because `torch.fx.subgraph_rewriter` leaves new nodes without example values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...kernels import ops
from ...kernels.platform.device import Device
from .context import PassContext
from .rewrite import inline, replace


@dataclass(frozen=True, slots=True)
class Pattern:
    """A function of `piecework::*` and aten ops, and the op of `kernels.ops` that replaces it.

    Both have the same arguments and results.

        def match(x, weight, eps, scale, dtype):
            return quantize_static(rms_norm(x, weight, eps), scale, dtype)

        Pattern(match, torch.ops.piecework.rms_norm_quantize_static.default)

    An argument matches any tensor or constant. If another node reads an intermediate result of
    `match`, it does not match.
    """

    match: Callable[..., Any]
    replacement: torch._ops.OpOverload

    @property
    def op(self) -> str:
        """The name of `replacement` in `kernels.ops`."""
        return self.replacement._schema.name.removeprefix("piecework::")

    def applies(self, platform: Device) -> bool:
        """Whether the platform has a kernel for the replacement. Without one, a compiler that fuses
        is as fast.
        """
        return ops.has_kernel(platform.device_type, self.op)

    def rewrite(self, graph: fx.Graph, device_type: str | None) -> int:
        """Replace all matches and return their number.

        If `device_type` is given, replace only those for which the device has a kernel.
        """
        from torch.fx.passes.utils.matcher_utils import SubgraphMatcher

        sought = fx.symbolic_trace(self.match).graph
        inside = [node for node in sought.nodes if node.op not in ("placeholder", "output")]
        # The matcher reports a match even if the graph lacks the op of a result.
        if not {node.target for node in inside} <= {node.target for node in graph.nodes}:
            return 0
        count, changed = 0, dict[fx.Node, fx.Node]()
        for found in SubgraphMatcher(sought).match(graph):
            nodes = sorted(found.nodes_map[node] for node in inside)
            readers = {user for old in found.returning_nodes for user in old.users}
            dtype = found.placeholder_nodes[0].meta["example_value"].dtype
            if device_type is not None and not ops.has_kernel(device_type, self.op, dtype):
                continue
            if any(reader < nodes[-1] for reader in readers.difference(nodes)):
                continue
            arguments = fx.map_arg(found.placeholder_nodes, lambda node: changed.get(node, node))
            new = inline(graph, nodes[-1], self.replacement, arguments)
            for old, by in zip(found.returning_nodes, new, strict=True):
                replace(old, by)
                changed[old] = by
            for node in reversed(nodes):
                graph.erase_node(node)
            count += 1
        return count


@dataclass(frozen=True, slots=True)
class Fusion:
    """A pass of patterns. No pattern matches the result of another one.

    If `device_type` is given, only ops with kernels of that device are replaced.
    """

    name: str
    patterns: tuple[Pattern, ...]
    device_type: str | None = None

    @property
    def key(self) -> str:
        return " ".join(
            [self.name, str(self.device_type), *(pattern.op for pattern in self.patterns)]
        )

    def __call__(self, graph: fx.Graph, context: PassContext) -> int:
        return sum(pattern.rewrite(graph, self.device_type) for pattern in self.patterns)
