"""Layers that are one weight matrix: projections, several of one input fused, and the embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def weight(*shape: int) -> nn.Parameter:
    """Uninitialised, in torch's default dtype and device; the loader fills it."""
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


class Linear(nn.Module):
    """y = x W^T + b: x [T, in], weight [out, in], or packed as the device's own kernels want it."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = weight(out_features, in_features)
        self.bias = weight(out_features) if bias else None
        self.layout: int | None = None
        self._op: torch._ops.OpOverload | None = None

    def use_packed(self, packed: torch.Tensor, layout: int, op: torch._ops.OpOverload) -> None:
        """From now on `packed` is the weight, which `op` knows how to multiply by: see
        `kernels.linear.LinearKernels`.
        """
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.layout, self._op = layout, op

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._op is None:
            return F.linear(x, self.weight, self.bias)
        result: torch.Tensor = self._op(x, self.weight, self.bias, self.out_features, self.layout)
        return result


class FusedLinear(Linear):
    """Several projections of one input as one multiplication. `parts`: the checkpoint's names and
    rows, in order.
    """

    def __init__(self, in_features: int, parts: dict[str, int], *, bias: bool = False) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias)
        self.parts = parts


class Embedding(nn.Module):
    """Rows of weight [vocab, hidden] by token id: [T] int64 to [T, hidden]."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = weight(vocab_size, hidden_size)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(input_ids, self.weight)
