"""compressed-tensors' format `pack-quantized`: W4A16 and W8A16."""

from __future__ import annotations

import torch

from .weight_only import GroupedWeight, fields, in_groups, word_bytes


def unpack(
    weight_packed: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_zero_point: torch.Tensor | None,
    weight_g_idx: torch.Tensor | None,
    in_features: int,
    bits: int,
) -> GroupedWeight:
    """weight_packed [N, ceil(K * bits / 32)] int32, weight_scale [N, groups], weight_zero_point
    [ceil(N * bits / 32), groups] int32 or None where all are zero, weight_g_idx [K] int32.

    Numbers and zero points are stored plus 2^(bits - 1)
    (compressed_tensors/compressors/pack_quantized/helpers.py).
    """
    rows = weight_packed.shape[0]
    numbers = word_bytes(weight_packed)[:, : in_features * bits // 8].contiguous()
    if weight_zero_point is None:
        zero = torch.full(weight_scale.shape, 1 << (bits - 1), dtype=torch.uint8)
    else:
        zero = fields(weight_zero_point.T, bits)[:, :rows].T.contiguous()
    weight = GroupedWeight(numbers, weight_scale, zero)
    return weight if weight_g_idx is None else in_groups(weight, weight_g_idx, bits)
