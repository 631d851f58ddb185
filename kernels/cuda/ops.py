"""The ops that layers call on NVIDIA GPUs, such as `piecework::rms_norm`: by a library's kernel if
one supports the call, otherwise by Triton's.

Signatures and meaning are those of `kernels.reference`. A traced forward does not depend on which
library is installed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from .. import reference
from ..ops import TRACED
from ..triton import ops as triton_ops
from . import fp4
from .libraries import TORCH, Library, leave_out, load, names
from .products import form_of
from .trial_process import TRIALS, Trials
from .trials import described

logger = logging.getLogger(__name__)

_LIBRARY = torch.library.Library("piecework", "FRAGMENT")  # type: ignore[no-untyped-call]
_TRIAL_ROWS = 4
_MANY_ROWS = 160  # Products use other kernels for many rows.


class Libraries:
    """Installed libraries. A trial in another process checks every kind of call before its results
    are used.

    A trial compiles kernels, and fails if a library was built for other GPUs or another torch. It
    may end its process, so a library is imported here only after its trial succeeded. There are no
    trials while a graph is captured. Warm-up has made every kind of call of a model by then.
    """

    def __init__(self, found: Sequence[Library] | None = None, trials: Trials = TRIALS) -> None:
        """`found` lists the libraries. None: look for them at the first call, so processes that
        compute nothing import nothing.
        """
        self._found, self._trials = found, trials
        self._passed: set[tuple[Any, ...]] = set()
        # By library and what it cannot compute (`_kernel_of`).
        self._failed: set[tuple[str, str]] = set()

    def compute(self, op: str, *given: Any) -> torch.Tensor | None:
        """Return the first library's result, or None if none supports this call."""
        if self._found is None:
            self._found = self._imported()
        layout, kernel = _layout(op, *given), _kernel_of(op, *given)
        for library in self._found:
            kind = (library.name, op, layout)
            if kind not in self._passed and (
                (library.name, kernel) in self._failed
                or not library.takes(op, *given)
                or not self._passes(kind, given)
            ):
                continue
            result: torch.Tensor | None = getattr(library, op)(*given)
            if result is not None:
                return result
        return None

    def _imported(self) -> list[Library]:
        found: list[Library] = []
        for name in names():
            if (reason := self._trials.import_failure(name)) is None:
                found.append(load(name))
            else:
                leave_out(name, reason)
        return [*found, TORCH]

    def _passes(self, kind: tuple[str, str, Any], given: Sequence[Any]) -> bool:
        """Return whether the library computes known numbers correctly in this layout. If not, the
        library is not used for this op, or for this form of products.
        """
        library, op, _ = kind
        kernel = _kernel_of(op, *given)
        if _recording(given[0].device):
            return False
        reason = self._trials.failure(
            {"library": library, "call": op, "arguments": _trial_arguments(op, given)}
        )
        if reason is not None:
            self._failed.add((library, kernel))
            leave_out(library, reason, kernel)
            return False
        if not any(passed[:2] == kind[:2] for passed in self._passed):
            logger.info("%s computes %s", library, op)
        self._passed.add(kind)
        return True


def _layout(op: str, x: torch.Tensor, *others: Any) -> tuple[Any, ...]:
    """Return what a library may choose its kernel by, except the number of rows."""
    if op != "scaled_linear":
        return x.dim(), x.shape[-1], x.dtype
    x_scale, weight, weight_scale, bias, dtype = others
    return x_scale.shape[1:], weight.shape, weight_scale.shape, bias is None, x.dtype, dtype


def _kernel_of(op: str, *given: Any) -> str:
    """Return the name of what fails as one: an op, or a product with one form of scales."""
    if op != "scaled_linear":
        return op
    _, x_scale, weight, weight_scale, *_ = given
    return f"{op} by {form_of(x_scale, weight, weight_scale)}"


def _trial_arguments(op: str, given: Sequence[Any]) -> list[Any]:
    if op != "scaled_linear":
        return [described(argument) for argument in (given[0][:_TRIAL_ROWS], *given[1:])]
    descriptions = [described(argument) for argument in given]
    for argument in descriptions[:2]:
        # x, and its scales unless there is only one: contiguous, whatever their row stride is now.
        if len(argument["shape"]) == 2:
            columns = argument["shape"][1]
            argument |= {"shape": [_MANY_ROWS, columns], "stride": [columns, 1]}
    return descriptions


def _recording(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


_libraries = Libraries()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    result = _libraries.compute("rms_norm", x, weight, eps)
    return triton_ops.rms_norm(x, weight, eps) if result is None else result


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    result = _libraries.compute("silu_and_mul", x)
    return triton_ops.silu_and_mul(x) if result is None else result


def scaled_linear(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    given = (x, x_scale, weight, weight_scale, bias, dtype)
    result = _libraries.compute("scaled_linear", *given)
    return triton_ops.scaled_linear(*given) if result is None else result


def add_rms_norm_quantize_fp4(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    factor: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Two kernels. Behind an all_reduce, flashinfer makes one of all of them (`fused_norms`)."""
    normalised, total = add_rms_norm(x, residual, weight, eps)
    return (*quantize_fp4(normalised, factor), total)


# The libraries' fused add and norm overwrites both inputs, and their rotation needs angles in
# another form. These two are Triton's.
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
# Only layers for which `fp4_obstacle` is None have these ops.
fp4_obstacle = fp4.obstacle
quantize_fp4 = fp4.quantize_fp4
silu_and_mul_quantize_fp4 = fp4.silu_and_mul_quantize_fp4
fp4_linear = fp4.fp4_linear
weight_only_linear = triton_ops.weight_only_linear
choose_experts = triton_ops.choose_experts
fused_moe = triton_ops.fused_moe
lora = triton_ops.lora
conv_step = triton_ops.conv_step
mamba2_step = triton_ops.mamba2_step
gated_delta_step = triton_ops.gated_delta_step
argmax = reference.argmax
sample_filtered = triton_ops.sample_filtered

for _name in TRACED.keys() & globals():
    _LIBRARY.impl(_name, globals()[_name], "CUDA")  # type: ignore[no-untyped-call]
