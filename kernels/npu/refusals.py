"""Replace kernels that this NPU or its CANN refuses by plain torch, and log each once."""

# mypy: disable-error-code="attr-defined"
# torch.npu exists after the import of torch_npu.

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

logger = logging.getLogger(__name__)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

refused: dict[str, str] = {}  # By op: torch_npu's error at the call that it refused.


def or_else(
    plain: Callable[Arguments, Result],
) -> Callable[[Callable[Arguments, Result | None]], Callable[Arguments, Result]]:
    """Make an op of a function that launches a kernel, or returns None if the kernel does not
    support the call.

    `plain` computes these calls, and all calls after the first refusal. torch_npu checks a call at
    its launch, so a refusal is an exception. It would end the capture of a graph, but a call that
    was warmed up is not refused there.
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
