"""Collectives fused with the ops beside them in a forward. Compiler passes insert these ops.

By default, an op here runs the group's collective and the other op in turn. A group that can do
both at once implements `FusesNorms` or `Pipelines`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F

from .collectives import get_group
from .ops import TRACED

# Ops of `kernels.ops` that can follow an all_reduce in one op, `all_reduce_NAME`.
NORMS = (
    "add_rms_norm",
    "add_rms_norm_quantize_static",
    "add_rms_norm_quantize_dynamic",
    "add_rms_norm_quantize_fp4",
)
piecework = torch.ops.piecework
_LIBRARY = torch.library.Library("piecework", "FRAGMENT")  # type: ignore[no-untyped-call]


@runtime_checkable
class FusesNorms(Protocol):
    """A group that can reduce, add and normalise at once."""

    def all_reduce_norm(
        self, norm: str, x: torch.Tensor, residual: torch.Tensor, *rest: Any
    ) -> tuple[torch.Tensor, ...] | None:
        """Return what `norm`, one of `NORMS`, gives for the sum of every rank's x [T, H].

        residual [T, H] and `rest` are the other arguments of `norm`. Every rank returns None if the
        group cannot do this for tensors of this kind.
        """
        ...


@runtime_checkable
class Pipelines(Protocol):
    """A group that multiplies some parts while others are being sent."""

    def multiply(
        self, op: str, x: torch.Tensor, *rest: torch.Tensor | torch.dtype | int | None
    ) -> torch.Tensor | None:
        """Return the result of the op with this name.

        `op` is all_gather_NAME or NAME_reduce_scatter for a name of `PRODUCTS`, or
        linear_all_reduce. `rest` holds its other arguments without the group. Every rank returns
        None if the group cannot do this for tensors of this kind.
        """
        ...


def _define(name: str, signature: str, more: str, run: Any, meta: Any) -> None:
    """Define an op with `signature`, and with the arguments `more` after the others."""
    signature = signature.replace(") ->", f", {more}) ->", 1)
    _LIBRARY.define(name + signature)  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, meta, "Meta")  # type: ignore[no-untyped-call]


def _define_norm(norm: str) -> None:
    meta: Any
    signature, meta = TRACED[norm]

    def run(x: torch.Tensor, *given: Any) -> tuple[torch.Tensor, ...]:
        *others, name = given
        group, x = get_group(name), x.contiguous()
        fused = group.all_reduce_norm(norm, x, *others) if isinstance(group, FusesNorms) else None
        if fused is not None:
            return fused
        compute: Any = getattr(piecework, norm)
        result: tuple[torch.Tensor, ...] = compute(group.all_reduce(x), *others)
        return result

    def without_group(*given: Any) -> Any:
        return meta(*given[:-1])

    _define(f"all_reduce_{norm}", signature, "str group", run, without_group)


def _pipelined(op: str, name: str, given: Sequence[Any]) -> torch.Tensor | None:
    group = get_group(name)
    return group.multiply(op, *given) if isinstance(group, Pipelines) else None


class Product(NamedTuple):
    """A linear op that has two fused ops, `all_gather_NAME` and `NAME_reduce_scatter`.

    `arguments` is the number of its arguments. If it is `scaled`, the second argument has the
    scales of x: one per row, which are gathered with the rows, or one for all rows.
    """

    name: str
    arguments: int
    scaled: bool = False


# The ops that compiler passes can fuse with a collective.
PRODUCTS: dict[Any, Product] = {}


def add_product(op: Any, name: str, signature: str, *, scaled: bool = False) -> None:
    """Define `all_gather_NAME` and `NAME_reduce_scatter` for a linear op with this signature.

    all_gather_NAME maps x [T / size, in] to [T, out]. NAME_reduce_scatter maps x [T, in] to
    [T / size, out].
    """
    PRODUCTS[op] = Product(name, signature.partition("->")[0].count(",") + 1, scaled)

    def places(factors: Sequence[Any]) -> range:
        """Return the places of the arguments that have a row for each row of x."""
        return range(2 if scaled and factors[1].dim() == 2 else 1)

    def gather(*given: Any) -> torch.Tensor:
        *factors, group, size = given
        result = _pipelined(f"all_gather_{name}", group, factors)
        if result is None:
            for place in places(factors):
                factors[place] = piecework.all_gather(factors[place], group, size)
            result = op(*factors)
        return result

    def scatter(*given: Any) -> torch.Tensor:
        *factors, group, size = given
        result = _pipelined(f"{name}_reduce_scatter", group, factors)
        return piecework.reduce_scatter(op(*factors), group, size) if result is None else result

    def gathered(*given: Any) -> torch.Tensor:
        *factors, _, size = given
        for place in places(factors):
            part = factors[place]
            factors[place] = part.new_empty(part.shape[0] * size, *part.shape[1:])
        result: torch.Tensor = op(*factors)
        return result

    def scattered(*given: Any) -> torch.Tensor:
        *factors, _, size = given
        result: torch.Tensor = op(*factors)
        return result.new_empty(result.shape[0] // size, result.shape[1])

    more = "str group, int size"
    _define(f"all_gather_{name}", signature, more, gather, gathered)
    _define(f"{name}_reduce_scatter", signature, more, scatter, scattered)


def _linear_all_reduce(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, name: str
) -> torch.Tensor:
    result = _pipelined("linear_all_reduce", name, (x, weight, bias))
    return piecework.all_reduce(F.linear(x, weight, bias), name) if result is None else result


for _norm in NORMS:
    _define_norm(_norm)
_LINEAR = "(Tensor x, Tensor weight, Tensor? bias) -> Tensor"
_define(
    "linear_all_reduce",
    _LINEAR,
    "str group",
    _linear_all_reduce,
    lambda x, weight, bias, name: x.new_empty(x.shape[0], weight.shape[0]),
)
add_product(F.linear, "linear", _LINEAR)
PRODUCTS[torch.ops.aten.linear.default] = PRODUCTS[F.linear]
for _name in ("scaled_linear", "weight_only_linear"):
    add_product(
        getattr(piecework, _name).default,
        _name,
        TRACED[_name][0],
        scaled=_name == "scaled_linear",
    )
