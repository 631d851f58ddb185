"""Layers of experts on Ascend NPUs: rows are grouped by expert, and `npu_grouped_matmul` multiplies
all groups at once.

Signature and meaning are those of `kernels.reference`. For the kernel's limits see the op
documentation of torch_npu 2.13 (`_op_plugin_docs.py`).
"""

from __future__ import annotations

import torch

from .. import reference
from .refusals import or_else

_HALVES = (torch.bfloat16, torch.float16)
# `group_type`: rows of x are grouped. `split_item`: all results are one tensor.
_ROWS, _ONE_RESULT = 0, 3


def _masked(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply every row by every expert and keep the result of its own. No shape and no wait
    depends on the choice of experts.
    """
    places = torch.arange(len(x), device=x.device)[:, None]
    out, begin = x.new_zeros(len(x), weight.shape[1]), torch.zeros_like(ends[:1])
    for expert, numbers in enumerate(weight):
        end = ends[expert : expert + 1]
        is_own = (places >= begin) & (places < end)
        out = torch.where(is_own, x @ numbers.t(), out)
        begin = end
    return out


def _grouped(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    (result,) = torch.ops.npu.npu_grouped_matmul(
        [x],
        [weight.transpose(1, 2)],
        group_list=ends.to(torch.int64),
        split_item=_ONE_RESULT,
        group_type=_ROWS,
        group_list_type=0,
    )
    found: torch.Tensor = result
    return found


def _plain(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down: torch.Tensor,
    down_bias: torch.Tensor | None,
    limit: float,
    weighs_input: bool,
) -> torch.Tensor:
    biases = gate_up_bias, down_bias
    given = x, topk_ids, topk_weights, gate_up, biases[0], down, biases[1], limit, weighs_input
    return reference.moe_by(_masked, *given)


@or_else(_plain)
def fused_moe(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down: torch.Tensor,
    down_bias: torch.Tensor | None,
    limit: float,
    weighs_input: bool,
) -> torch.Tensor | None:
    if x.dtype not in _HALVES or x.numel() == 0:
        return None
    return reference.moe_by(
        _grouped,
        x,
        topk_ids,
        topk_weights,
        gate_up,
        gate_up_bias,
        down,
        down_bias,
        limit,
        weighs_input,
    )
