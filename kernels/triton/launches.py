"""Launches of Triton kernels that are repeated with other addresses, as the layers of a step do.

Triton binds and specialises all arguments in Python at each launch, which takes longer than small
kernels run. A repeated launch passes its arguments to the compiled kernel at once. The caller
ensures that repeated launches have equal dtypes, shapes and strides, and addresses that are
multiples of 16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any, NamedTuple, TypeVar

import torch
from triton import OutOfResources

ALIGNMENT = 16  # What Triton specialises addresses by.

_Choice = TypeVar("_Choice")
_Result = TypeVar("_Result")


def are_aligned(addresses: Iterable[int]) -> bool:
    return reduce(or_, addresses) % ALIGNMENT == 0


class Moving(NamedTuple):
    """A tensor that differs in repeated launches: the address of source `source` and `offset`
    bytes.
    """

    tensor: torch.Tensor
    source: int
    offset: int = 0


class Value(NamedTuple):
    """A float that differs in repeated launches: number `source` of their values."""

    number: float
    source: int


class Launch:
    """A launch to repeat."""

    __slots__ = ("_arguments", "_launch", "_moving", "_values")

    def __init__(
        self, launch: Callable[..., None], arguments: Sequence[Any], constants: Sequence[Any]
    ) -> None:
        self._launch = launch
        self._arguments = [
            each.data_ptr() if isinstance(each, torch.Tensor) else each for each in arguments
        ]
        self._arguments += constants
        self._moving = [
            (place, each.source, each.offset)
            for place, each in enumerate(arguments)
            if isinstance(each, Moving)
        ]
        self._values = [
            (place, each.source) for place, each in enumerate(arguments) if isinstance(each, Value)
        ]

    def repeat(self, sources: Sequence[int], values: Sequence[float], stream: Any) -> None:
        """Launch with the addresses `sources` and the floats `values`."""
        arguments = self._arguments.copy()
        for place, source, offset in self._moving:
            arguments[place] = sources[source] + offset
        for place, source in self._values:
            arguments[place] = values[source]
        self._launch(*arguments, stream=stream)


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: Sequence[Any],
    constants: Mapping[str, Any],
    **options: int,
) -> Launch | None:
    """Launch a kernel for the first time. Return what repeats it, or None if Triton's interpreter
    has run it.
    """
    plain = [each[0] if isinstance(each, (Moving, Value)) else each for each in arguments]
    compiled = kernel[grid](*plain, **constants, **options)
    if compiled is None:
        return None
    named = [constants[name] for name in kernel.arg_names[len(arguments) :]]
    return Launch(compiled[(*grid, 1, 1)[:3]], arguments, named)


# The first choice that a device has not refused, by what the choice depends on.
_accepted: dict[Any, int] = {}


def first_accepted(
    key: Any, choices: Sequence[_Choice], launch: Callable[[_Choice], _Result]
) -> _Result:
    """Launch with the first of `choices` that the device has shared memory and registers for. Raise
    `OutOfResources` if it refuses all. `key`: what the kernel's need depends on.
    """
    first = _accepted.get(key, 0)
    for index in range(first, len(choices)):
        try:
            result = launch(choices[index])
        except OutOfResources:
            _accepted[key] = index + 1
            if index + 1 == len(choices):
                raise
        else:
            return result
    raise OutOfResources(0, 0, "every tile was refused before")
