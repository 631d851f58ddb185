"""Writers of published layouts: the tensors of one linear layer as each library saves them.

A weight is numbers [N, K] of `bits` bits, with scale and zero point [N, groups]; its value is
(number - zero) * scale.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

Tensors = dict[str, torch.Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(numbers: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """[rows, n] to [rows, n * bits / 32] int32: number `order[i]` of each word lies at its bits
    i * `bits`.
    """
    places = order or range(32 // bits)
    each = numbers.long().view(len(numbers), -1, 32 // bits)
    total = sum(each[..., place] << (bits * i) for i, place in enumerate(places))
    assert isinstance(total, torch.Tensor)
    return total.to(torch.uint32).view(torch.int32)


def write_awq(numbers: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> Tensors:
    """AutoAWQ, awq/modules/linear/gemm.py: `WQLinear_GEMM.from_linear`."""
    return {
        "qweight": words(numbers.T, 4, AWQ_ORDER),
        "qzeros": words(zero.T, 4, AWQ_ORDER),
        "scales": scale.T.contiguous().half(),
    }


def write_gptq(
    numbers: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    bits: int = 4,
    *,
    g_idx: torch.Tensor | None = None,
    version: int = 1,
) -> Tensors:
    """GPTQModel, gptqmodel/nn_modules/qlinear: `pack`; for version 1
    `convert_gptq_v2_to_v1_format_module` of gptqmodel/utils/model.py, which subtracts whole words.
    """
    qzeros = words(zero.T, bits)
    if version == 1:
        qzeros = qzeros - (0x11111111 if bits == 4 else 0x01010101)
    columns = torch.arange(numbers.shape[1]) // (numbers.shape[1] // scale.shape[1])
    return {
        "qweight": words(numbers, bits).T.contiguous(),
        "qzeros": qzeros,
        "scales": scale.T.contiguous().half(),
        "g_idx": (columns if g_idx is None else g_idx).int(),
    }


class Quantized(NamedTuple):
    """A weight that quantisers would have found, and its writer's settings."""

    numbers: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    group_of: torch.Tensor

    @property
    def values(self) -> torch.Tensor:
        """[N, K] float32."""
        difference = self.numbers - self.zero[:, self.group_of]
        return difference.float() * self.scale.float()[:, self.group_of]


def quantized(
    weight: torch.Tensor, bits: int, group_of: torch.Tensor, *, symmetric: bool
) -> Quantized:
    """Rounded to the nearest number, column k by the scale of group `group_of[k]`."""
    groups = int(group_of.max()) + 1
    each = torch.stack([weight[:, group_of == group] for group in range(groups)], dim=1)
    most, half = 2**bits - 1, 2 ** (bits - 1)
    if symmetric:
        scale = (each.abs().amax(-1) / (half - 1)).half()
        zero = torch.full(scale.shape, half)
    else:
        low, high = each.amin(-1).clamp(max=0.0), each.amax(-1).clamp(min=0.0)
        scale = ((high - low) / most).half()
        zero = (-low / scale.float()).round().clamp(0, most).long()
    numbers = (weight / scale.float()[:, group_of]).round() + zero[:, group_of]
    return Quantized(numbers.clamp(0, most).long(), scale, zero, group_of)
