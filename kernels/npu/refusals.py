"""Kernels that this NPU or its CANN refuses are left out, each said once; plain torch computes in
their place.
"""

# mypy: disable-error-code="attr-defined"
# torch.npu exists once torch_npu is imported.

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

logger = logging.getLogger(__name__)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

refused: dict[str, str] = {}
"""By op of ours, what torch_npu said to a call of its kernel that it raised at."""


def or_else(
    plain: Callable[Arguments, Result],
) -> Callable[[Callable[Arguments, Result | None]], Callable[Arguments, Result]]:
    """Makes an op of a function that launches a kernel, or gives None for what the kernel does not
    take; `plain` computes that, and all from the first refusal on.

    torch_npu checks a call while it launches it, so a refusal is an exception. While a graph is
    recorded it ends the capture: a call that was warmed up is not refused there.
    """

    def made(launch: Callable[Arguments, Result | None]) -> Callable[Arguments, Result]:
        @wraps(launch)
        def op(*args: Arguments.args, **named: Arguments.kwargs) -> Result:
            if launch.__name__ not in refused:
                try:
                    result = launch(*args, **named)
                except RuntimeError as error:
                    _note(launch.__name__, error)
                else:
                    if result is not None:
                        return result
            return plain(*args, **named)

        return op

    return made


def _note(name: str, error: RuntimeError) -> None:
    out_of_memory = isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)
    if out_of_memory or torch.npu.is_current_stream_capturing():
        raise error
    refused[name] = str(error).partition("\n")[0]
    logger.warning("plain torch computes %s: torch_npu refuses it: %s", name, refused[name])
