"""Collectives and what stands beside them in a forward, as one op: passes put them there.

Each means the group's collective and `kernels.ops`, one after the other; a group that does better
in one go has `Fuses`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch

from .collectives import get_group
from .ops import TRACED

NORMS = ("add_rms_norm", "add_rms_norm_quantize_static", "add_rms_norm_quantize_dynamic")
"""Of `kernels.ops`, what may follow an all_reduce in one op: `all_reduce_NAME`."""
_LIBRARY = torch.library.Library("piecework", "FRAGMENT")  # type: ignore[no-untyped-call]


@runtime_checkable
class Fuses(Protocol):
    """A group that reduces, adds and normalises at once."""

    def all_reduce_norm(
        self, norm: str, x: torch.Tensor, residual: torch.Tensor, *rest: Any
    ) -> tuple[torch.Tensor, ...] | None:
        """What `norm`, one of `NORMS`, gives for the sum of every rank's x [T, H]; residual [T, H]
        and `rest` are its other arguments. None, on every rank: not for tensors of this kind.
        """
        ...


def _reduced(norm: str) -> Callable[..., tuple[torch.Tensor, ...]]:
    def run(x: torch.Tensor, *given: Any) -> tuple[torch.Tensor, ...]:
        *others, name = given
        group, x = get_group(name), x.contiguous()
        fused = group.all_reduce_norm(norm, x, *others) if isinstance(group, Fuses) else None
        if fused is not None:
            return fused
        result: tuple[torch.Tensor, ...] = getattr(torch.ops.piecework, norm)(
            group.all_reduce(x), *others
        )
        return result

    return run


def _without_group(meta: Any) -> Callable[..., Any]:
    return lambda *given: meta(*given[:-1])


for _norm in NORMS:
    _signature, _meta = TRACED[_norm]
    _name = f"all_reduce_{_norm}"
    _LIBRARY.define(_name + _signature.replace(") ->", ", str group) ->", 1))  # type: ignore[no-untyped-call]
    _LIBRARY.impl(_name, _reduced(_norm), "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    _LIBRARY.impl(_name, _without_group(_meta), "Meta")  # type: ignore[no-untyped-call]
