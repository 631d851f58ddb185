"""GPTQ (arXiv:2210.17323) as AutoGPTQ and GPTQModel write it."""

from __future__ import annotations

import torch

from .weight_only import GroupedWeight, fields, in_groups, word_bytes

_ONES = {4: 0x11111111, 8: 0x01010101}


def unpack(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    g_idx: torch.Tensor,
    bits: int,
    *,
    zeros_less_one: bool,
) -> GroupedWeight:
    """qweight [K * bits / 32, N] int32, qzeros [groups, N * bits / 32] int32, scales [groups, N],
    g_idx [K] int32: the group of each column.

    `zeros_less_one`: zero points are stored less one, and added to as whole words, as GPTQModel
    does (gptqmodel/utils/model.py): it subtracts so, with borrows.
    """
    numbers = word_bytes(qweight.T)
    zeros = fields(qzeros + _ONES[bits] if zeros_less_one else qzeros, bits)
    weight = GroupedWeight(numbers, scales.T.contiguous(), zeros.T.contiguous())
    return in_groups(weight, g_idx, bits)
