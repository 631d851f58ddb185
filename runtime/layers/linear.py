"""Layers that are one weight matrix, and the contract of how such a weight is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from ...kernels import ops
from ...kernels.linear import LinearKernels


def weight(*shape: int) -> nn.Parameter:
    """Uninitialised, in torch's default dtype and device; the loader fills it."""
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint that has not been read yet. `name`: as Hugging Face's call it.

    `copy_to` writes the values into a contiguous tensor of the same shape and any dtype and device;
    it may be called from any thread, and raises `ValueError` where the file is broken.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    copy_to: Callable[[torch.Tensor], None]
    kind: str | None = None
    """The quantised format of GGUF that it is stored in, such as "Q4_1"; None for numbers."""
    blocks: Callable[[], torch.Tensor] | None = None
    """Gives a quantised one as it is stored: [rows, bytes] uint8."""


class LinearMethod(Protocol):
    """How the weight of one linear layer is loaded, kept and multiplied by; each format of weights
    is a file of `quantization/`.

        method.create(layer)
        for part in layer.parts:
            method.load(layer, part, stored[part])    # from several threads
        method.finish(layer, kernels)
        y = method.apply(layer, x)
    """

    @property
    def kind(self) -> str:
        """What the weight is stored as: "bfloat16" for numbers, or a quantised format."""
        ...

    def create(self, layer: Linear) -> None:
        """Give the layer a weight to load into, in torch's default dtype and device."""
        ...

    def load(self, layer: Linear, part: str, tensor: StoredTensor) -> None:
        """Take the rows of a part of the layer."""
        ...

    def finish(self, layer: Linear, kernels: LinearKernels | None) -> None:
        """Bring the whole weight into the form that `apply` reads, packed where the device has
        kernels for that. On the meta device only its shape.
        """
        ...

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] to [T, out], by ops that passes can find in a graph."""
        ...


class QuantizedInput(nn.Module):
    """How a layer makes numbers of 8 bits of its x: by the scale [1] float32 that the checkpoint
    gives, or by one for each `group` columns of a row, found when it runs.
    """

    def __init__(self, dtype: torch.dtype, group: int, scale: torch.Tensor | None = None) -> None:
        super().__init__()
        self.dtype, self.group = dtype, group
        self.scale = None if scale is None else nn.Parameter(scale, requires_grad=False)

    def quantize(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, in] to numbers [T, in] and scales, [1] or [T, in / group] float32."""
        if self.scale is not None:
            return ops.quantize_static(x, self.scale, self.dtype), self.scale
        return ops.quantize_dynamic(x, self.group, self.dtype)


class Linear(nn.Module):
    """y = x W^T + b: x [T, in], weight [out, in], or in the form that `method` keeps it in."""

    weight: nn.Parameter
    method: LinearMethod

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.parts = {"": out_features}
        self.bias = weight(out_features) if bias else None
        self.layout: int | None = None
        self.op: torch._ops.OpOverload | None = None
        self.input: QuantizedInput | None = None

    def rows(self, part: str) -> slice:
        """Where a part lies in the weight and the bias."""
        names = list(self.parts)
        begin = sum(self.parts[name] for name in names[: names.index(part)])
        return slice(begin, begin + self.parts[part])

    def pack(
        self,
        kernels: LinearKernels,
        kind: str,
        parts: Sequence[torch.Tensor],
        scales: Sequence[torch.Tensor] = (),
    ) -> None:
        """From now on the weight is that of `parts` in the device's own layout: see
        `LinearKernels`. On the meta device only its shape.
        """
        layout = kernels.layout(kind, self.in_features)
        assert layout is not None
        if self.weight.is_meta:
            shape = kernels.packed_shape(layout, self.in_features, self.out_features)
            packed = torch.empty(shape, dtype=torch.uint8, device="meta")
        else:
            packed = kernels.pack(kind, parts, scales)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.layout = layout
        self.op = kernels.op if self.input is None else kernels.scaled_op

    def multiply_packed(self, x: torch.Tensor) -> torch.Tensor:
        """For methods whose `finish` has called `pack`: x [T, in] to [T, out], by way of `input`
        where the method has set that before.
        """
        assert self.op is not None
        given = (x,) if self.input is None else self.input.quantize(x)
        result: torch.Tensor = self.op(
            *given, self.weight, self.bias, self.out_features, self.layout
        )
        return result

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.method.apply(self, x)


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
