"""Shapes that depend on the number of tokens."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from .core.errors import TraceError


class Extent(NamedTuple):
    """A size or a stride: `per_unit` * (T / `unit`) + `fixed`. `unit`: of which T must be a
    multiple, the number of ranks where each has rows of its own.
    """

    per_unit: int
    fixed: int
    unit: int = 1

    @property
    def is_rows(self) -> bool:
        """Whether it counts tokens: all of a step, or one rank's."""
        return self.per_unit in (1, self.unit) and self.fixed == 0

    def at(self, tokens: int) -> int:
        return self.per_unit * (tokens // self.unit) + self.fixed


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
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TensorSpec:
        """The inverse of `to_json`, after a way through JSON. Raises `KeyError` or `TypeError` on
        other data.
        """
        extents = {
            name: tuple(Extent(*extent) for extent in data[name]) for name in ("shape", "stride")
        }
        return cls(**data | extents)


class TokenShapes:
    """Reads sizes of a trace's tensors as functions of the number of tokens. `tokens`: the symbols
    that stand for it, a multiple of `unit`.
    """

    def __init__(self, shape_env: Any, tokens: set[Any], unit: int = 1) -> None:
        self._shape_env, self.unit = shape_env, unit
        self._tokens = next(iter(tokens))
        self._same = dict.fromkeys(tokens, self._tokens)

    def expression(self, size: Any) -> Any:
        """A size, or a scalar computed from sizes, as a sympy expression of the one symbol. Raises
        `TraceError`.
        """
        if not isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool):
            return size
        expression = self.simplify(size.node.expr)
        if expression.free_symbols - {self._tokens}:
            raise TraceError(f"a number depends on data: {expression}")
        return expression

    def simplify(self, expression: Any) -> Any:
        return self._shape_env.replace(expression).subs(self._same)

    def check_guards(self) -> None:
        """Raises `TraceError` where anything was assumed of the number of tokens."""
        import sympy

        for guard in self._shape_env.guards:
            if self.simplify(guard.expr) != sympy.true:
                raise TraceError(
                    "the forward takes another way for some numbers of tokens: it assumes "
                    f"{guard.expr} ({guard.sloc})"
                )

    def extent(self, size: int | torch.SymInt) -> Extent:
        """Raises `TraceError` where the size is no linear function of the number of tokens."""
        if isinstance(size, int):
            return Extent(0, size)
        expression = self.expression(size)
        at = [int(expression.subs(self._tokens, units * self.unit)) for units in (1000, 1001, 2000)]
        per_unit = at[1] - at[0]
        if at[2] - at[0] != 1000 * per_unit:
            raise TraceError(f"a size is no linear function of the number of tokens: {expression}")
        return Extent(per_unit, at[0] - 1000 * per_unit, self.unit)

    def spec(self, tensor: torch.Tensor, *, weight: bool) -> TensorSpec:
        shape, stride = (
            tuple(self.extent(size) for size in sizes) for sizes in (tensor.shape, tensor.stride())
        )
        return TensorSpec(
            shape=shape,
            stride=stride,
            dtype=dtype_name(tensor),
            device=str(tensor.device),
            weight=weight,
        )


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
