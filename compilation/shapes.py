"""Shapes that depend on the number of tokens."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from .core.errors import TraceError


class Extent(NamedTuple):
    """A size or a stride, as a function of the number of tokens T: `per_unit` * (T / `unit`) +
    `fixed`.

    T must be a multiple of `unit`, which is the number of ranks if rows are split over ranks.
    """

    per_unit: int
    fixed: int
    unit: int = 1

    @property
    def is_rows(self) -> bool:
        """Whether it is the number of tokens, of the step or of one rank."""
        return self.per_unit in (1, self.unit) and self.fixed == 0

    def at(self, tokens: int) -> int:
        return self.per_unit * (tokens // self.unit) + self.fixed


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Describes a tensor without its numbers.

    `dtype` is `str(torch.dtype)` without its prefix, `device` is `str(torch.device)`. `weight` says
    that it is a parameter or a buffer of the model, the same tensor at every call.
    """

    shape: tuple[Extent, ...]
    stride: tuple[Extent, ...]
    dtype: str
    device: str
    weight: bool

    def empty(self, tokens: int) -> torch.Tensor:
        """Return an uninitialised tensor of this spec for a number of tokens."""
        shape, stride = (
            [extent.at(tokens) for extent in extents] for extents in (self.shape, self.stride)
        )
        return torch.empty_strided(
            shape, stride, dtype=getattr(torch, self.dtype), device=self.device
        )

    def describes(self, tensor: torch.Tensor) -> bool:
        """Whether a weight has this spec."""
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
        """Read a spec from the JSON of `to_json`.

        Raise `KeyError` or `TypeError` for other data.
        """
        extents = {
            name: tuple(Extent(*extent) for extent in data[name]) for name in ("shape", "stride")
        }
        return cls(**data | extents)


class TokenShapes:
    """Reads the sizes of traced tensors as functions of the number of tokens.

    `tokens` are the symbols of that number, which is a multiple of `unit`.
    """

    def __init__(self, shape_env: Any, tokens: set[Any], unit: int = 1) -> None:
        self._shape_env, self.unit = shape_env, unit
        self._tokens = next(iter(tokens))
        self._same = dict.fromkeys(tokens, self._tokens)

    def expression(self, size: Any) -> Any:
        """Return a size, or a scalar computed from sizes, as a sympy expression of the one symbol.

        Raise `TraceError` if it depends on data.
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
        """Raise `TraceError` if the trace assumes anything about the number of tokens."""
        import sympy

        for guard in self._shape_env.guards:
            if self.simplify(guard.expr) != sympy.true:
                raise TraceError(
                    "the forward branches on the number of tokens: it assumes "
                    f"{guard.expr} ({guard.sloc})"
                )

    def extent(self, size: int | torch.SymInt) -> Extent:
        """Return a size as an `Extent`. Raise `TraceError` if it is not linear in the tokens."""
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
