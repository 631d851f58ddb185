"""all_reduce, then add and RMSNorm (and quantise, where `norm_quant` has taken that in) become one
op: one pass over the rows where there were two or three.
"""

from __future__ import annotations

import torch
from torch import fx

from ....kernels.fused_collectives import NORMS
from ..context import PassContext

piecework = torch.ops.piecework
_FUSED = {
    getattr(piecework, norm).default: getattr(piecework, f"all_reduce_{norm}").default
    for norm in NORMS
}


class AllreduceNorm:
    """No pattern: a forward's last norm gives a sum that nobody reads."""

    name = key = "allreduce_norm"

    def __call__(self, graph: fx.Graph, context: PassContext) -> int:
        count = 0
        for reduce in graph.find_nodes(
            op="call_function", target=piecework.all_reduce.default, sort=True
        ):
            (x, group), readers = reduce.args, list(reduce.users)
            norm = readers[0] if readers else reduce
            if len(readers) != 1 or norm.target not in _FUSED or norm.args.count(reduce) != 1:
                continue
            if norm.args[0] is not reduce:
                continue
            norm.target, norm.args = _FUSED[norm.target], (x, *norm.args[1:], group)
            graph.erase_node(reduce)
            count += 1
        return count
