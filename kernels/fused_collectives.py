"""Collectives fused with the ops beside them in a forward. Compiler passes insert these ops.

By default, an op here runs the group's collective and the other op in turn. A group that can do
both at once implements `FusesNorms` or `Pipelines`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F

from .collectives import get_group
from .ops import TRACED

# Ops of `kernels.ops` that can follow an all_reduce in one op, `all_reduce_NAME`.
NORMS = ("add_rms_norm", "add_rms_norm_quantize_static", "add_rms_norm_quantize_dynamic")
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
        self, op: str, x: torch.Tensor, *rest: torch.Tensor | torch.dtype | None
    ) -> torch.Tensor | None:
        """Return the result of the op with this name.

        `op` is all_gather_linear, linear_reduce_scatter, either of them with scaled_linear, or
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


def _linear_all_reduce(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, name: str
) -> torch.Tensor:
    result = _pipelined("linear_all_reduce", name, (x, weight, bias))
    return piecework.all_reduce(F.linear(x, weight, bias), name) if result is None else result


def _define_products(linear: str, signature: str) -> None:
    """Define all_gather_LINEAR and LINEAR_reduce_scatter.

    all_gather_LINEAR maps x [T / size, in] to [T, out]; if each row has its own scale, the scales
    are gathered too. LINEAR_reduce_scatter maps x [T, in] to [T / size, out].
    """
    scaled = linear == "scaled_linear"
    product: Any = piecework.scaled_linear if scaled else F.linear

    def gather(*given: Any) -> torch.Tensor:
        *factors, name, size = given
        result = _pipelined(f"all_gather_{linear}", name, factors)
        if result is None:
            for place in range(2 if scaled and factors[1].dim() == 2 else 1):
                factors[place] = piecework.all_gather(factors[place], name, size)
            result = product(*factors)
        return result

    def scatter(*given: Any) -> torch.Tensor:
        *factors, name, size = given
        result = _pipelined(f"{linear}_reduce_scatter", name, factors)
        return piecework.reduce_scatter(product(*factors), name, size) if result is None else result

    def shaped(rows: Any, given: Sequence[Any]) -> torch.Tensor:
        x, weight, dtype = given[0], given[2 if scaled else 1], given[5] if scaled else None
        result: torch.Tensor = x.new_empty(rows, weight.shape[0], dtype=dtype)
        return result

    more = "str group, int size"
    _define(
        f"all_gather_{linear}",
        signature,
        more,
        gather,
        lambda *given: shaped(given[0].shape[0] * given[-1], given),
    )
    _define(
        f"{linear}_reduce_scatter",
        signature,
        more,
        scatter,
        lambda *given: shaped(given[0].shape[0] // given[-1], given),
    )


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
_define_products("linear", _LINEAR)
_define_products("scaled_linear", TRACED["scaled_linear"][0])
