"""The ops that layers call on NVIDIA GPUs, `piecework::rms_norm` and its like: a library's kernel
where one takes the call, else Triton's.

Signatures and meaning as in `kernels.reference`. What was traced does not depend on which library
is installed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from .. import reference
from ..ops import TRACED
from ..triton import ops as triton_ops
from .libraries import LibraryOps, leave_out, load, names
from .trial_process import TRIALS, Trials
from .trials import described

logger = logging.getLogger(__name__)

_LIBRARY = torch.library.Library("piecework", "FRAGMENT")  # type: ignore[no-untyped-call]
_TRIAL_ROWS = 4


class Libraries:
    """Installed libraries, each tried on every kind of call before its results are used, by another
    process.

    A trial is where kernels are compiled, and where a library that was built for other GPUs, or
    another torch, is found out. Its process may end by that; a library is imported here only once
    that went well there. There is no trial while a graph is recorded: warm-up has had every kind of
    call of a model by then.
    """

    def __init__(self, found: Sequence[LibraryOps] | None = None, trials: Trials = TRIALS) -> None:
        """`found`: None for what is installed, which is looked for at the first call: processes
        that compute nothing import nothing.
        """
        self._found, self._trials = found, trials
        self._passed: set[tuple[Any, ...]] = set()
        self._failed: set[tuple[str, str]] = set()

    def compute(self, op: str, x: torch.Tensor, *others: Any) -> torch.Tensor | None:
        """The first library's result; None where none takes this call."""
        if self._found is None:
            self._found = self._imported()
        for library in self._found:
            kind = (library.name, op, x.dim(), x.shape[-1], x.dtype)
            if kind[:2] in self._failed or not library.takes(op, x, *others):
                continue
            if kind in self._passed or self._passes(
                library.name, op, kind, [x[:_TRIAL_ROWS], *others]
            ):
                result: torch.Tensor = getattr(library, op)(x, *others)
                return result
        return None

    def _imported(self) -> list[LibraryOps]:
        found = []
        for name in names():
            if (reason := self._trials.import_failure(name)) is None:
                found.append(load(name))
            else:
                leave_out(name, reason)
        return found

    def _passes(self, library: str, op: str, kind: tuple[Any, ...], given: Sequence[Any]) -> bool:
        """Whether the library computes a few rows, laid out as these, of numbers that are known.
        For an op that fails it is left out.
        """
        if _recording(given[0].device):
            return False
        reason = self._trials.failure(
            {
                "library": library,
                "call": op,
                "arguments": [described(argument) for argument in given],
            }
        )
        if reason is not None:
            self._failed.add((library, op))
            leave_out(library, reason, op)
            return False
        if not any(passed[:2] == kind[:2] for passed in self._passed):
            logger.info("%s computes %s", library, op)
        self._passed.add(kind)
        return True


def _recording(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


_libraries = Libraries()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    result = _libraries.compute("rms_norm", x, weight, eps)
    return triton_ops.rms_norm(x, weight, eps) if result is None else result


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    result = _libraries.compute("silu_and_mul", x)
    return triton_ops.silu_and_mul(x) if result is None else result


# The libraries' fused add and norm writes over both its inputs, and their rotation wants other
# angles: these two are Triton's.
add_rms_norm = triton_ops.add_rms_norm
rotary_embedding = triton_ops.rotary_embedding
norm_rotary_embedding = triton_ops.norm_rotary_embedding
quantize_static = triton_ops.quantize_static
quantize_dynamic = triton_ops.quantize_dynamic
rms_norm_quantize_static = triton_ops.rms_norm_quantize_static
rms_norm_quantize_dynamic = triton_ops.rms_norm_quantize_dynamic
add_rms_norm_quantize_static = triton_ops.add_rms_norm_quantize_static
add_rms_norm_quantize_dynamic = triton_ops.add_rms_norm_quantize_dynamic
silu_and_mul_quantize_static = triton_ops.silu_and_mul_quantize_static
silu_and_mul_quantize_dynamic = triton_ops.silu_and_mul_quantize_dynamic
scaled_linear = triton_ops.scaled_linear
weight_only_linear = triton_ops.weight_only_linear
argmax = reference.argmax
sample_filtered = triton_ops.sample_filtered

for _name in TRACED.keys() & globals():
    _LIBRARY.impl(_name, globals()[_name], "CUDA")  # type: ignore[no-untyped-call]
