"""Fuses all_reduce, addition and RMSNorm, and quantisation if `norm_quant` has fused it, into one
op.

The op reads the rows once instead of two or three times.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from ....kernels.fused_collectives import NORMS
from ..context import PassContext
from ..rewrite import our_op

_FUSED = {norm: getattr(torch.ops.piecework, f"all_reduce_{norm}").default for norm in NORMS}


@dataclass(frozen=True, slots=True)
class AllreduceNorm:
    """Fuses sums of `dtypes`, or of all dtypes if None.

    It is not a `Pattern`, because no node reads the sum of a forward's last norm.
    """

    dtypes: tuple[torch.dtype, ...] | None = None
    name = "allreduce_norm"

    @property
    def key(self) -> str:
        return f"{self.name} {self.dtypes}"

    def __call__(self, graph: fx.Graph, context: PassContext) -> int:
        count = 0
        for reduce in [node for node in graph.nodes if our_op(node) == "all_reduce"]:
            (x, group), readers = reduce.args, list(reduce.users)
            fused = _FUSED.get(our_op(readers[0])) if len(readers) == 1 else None
            norm = readers[0] if readers else reduce
            if self.dtypes is not None and reduce.meta["example_value"].dtype not in self.dtypes:
                continue
            if fused is None or norm.args[0] is not reduce or norm.args.count(reduce) != 1:
                continue
            norm.target, norm.args = fused, (x, *norm.args[1:], group)
            graph.erase_node(reduce)
            count += 1
        return count
