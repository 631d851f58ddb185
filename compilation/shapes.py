"""Shapes that depend on the number of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


class Extent(NamedTuple):
    """A size or a stride: `per_token` * T + `fixed`."""

    per_token: int
    fixed: int

    def at(self, tokens: int) -> int:
        return self.per_token * tokens + self.fixed


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor without its numbers. `dtype` as in `str(torch.bfloat16)` without the prefix,
    `device` as in `str(torch.device)`.

    `weight`: it is a parameter or a buffer of the model, the same tensor at every call.
    """

    shape: tuple[Extent, ...]
    stride: tuple[Extent, ...]
    dtype: str
    device: str
    weight: bool

    def empty(self, tokens: int) -> torch.Tensor:
        """An uninitialised tensor of this kind for a number of tokens."""
        shape, stride = (
            [extent.at(tokens) for extent in extents] for extents in (self.shape, self.stride)
        )
        return torch.empty_strided(
            shape, stride, dtype=getattr(torch, self.dtype), device=self.device
        )

    def describes(self, tensor: torch.Tensor) -> bool:
        """Whether a weight is such a tensor."""
        return (
            [extent.fixed for extent in self.shape] == list(tensor.shape)
            and [extent.fixed for extent in self.stride] == list(tensor.stride())
            and self.dtype == dtype_name(tensor)
            and torch.device(self.device).type == tensor.device.type
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "stride": self.stride,
            "dtype": self.dtype,
            "device": self.device,
            "weight": self.weight,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TensorSpec:
        """The inverse of `to_json`, after a way through JSON. Raises `KeyError` or `TypeError` on
        other data.
        """
        shape, stride = (
            tuple(Extent(*extent) for extent in data[name]) for name in ("shape", "stride")
        )
        return cls(
            shape=shape,
            stride=stride,
            dtype=data["dtype"],
            device=data["device"],
            weight=data["weight"],
        )


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
