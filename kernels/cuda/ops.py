"""The ops that layers call on NVIDIA GPUs, `piecework::rms_norm` and its like: a library's kernel where one takes the call, else Triton's.

Signatures and meaning as in `kernels.reference`. They are ops of torch, so that tracing sees one node and no kernel launch, and
what was traced does not depend on which library is installed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from .. import reference
from ..triton import ops as triton_ops
from .libraries import LibraryOps, installed, leave_out

logger = logging.getLogger(__name__)

_LIBRARY = torch.library.Library("piecework", "FRAGMENT")  # type: ignore[no-untyped-call]
_TRIAL_ROWS = 4
_TRIAL_TOLERANCE = 2e-2
"""Of |result - definition| / |definition|: what rounding makes of bfloat16, and far from what a broken kernel does."""


class Libraries:
    """Installed libraries, each tried once on every kind of call before its results are used.

    A trial is where kernels are compiled, and where a library that was built for other GPUs, or another torch, is found out. It
    waits for the device, so there is none while a graph is recorded: warm-up has had every kind of call of a model by then.
    """

    def __init__(self, found: Sequence[LibraryOps] | None = None) -> None:
        """`found`: None for what is installed, which is looked for at the first call: processes that compute nothing import nothing."""
        self._found = found
        self._tried: set[tuple[Any, ...]] = set()

    def compute(self, op: str, x: torch.Tensor, *others: Any) -> torch.Tensor | None:
        """The first library's result; None where none takes this call."""
        if self._found is None:
            self._found = installed()
        for library in self._found:
            kind = (library.name, op, x.dim(), x.shape[-1], x.dtype)
            if library.takes(op, x, *others) and (kind in self._tried or self._try(library, op, kind, x, others)):
                result: torch.Tensor = getattr(library, op)(x, *others)
                return result
        return None

    def _try(self, library: LibraryOps, op: str, kind: tuple[Any, ...], x: torch.Tensor, others: tuple[Any, ...]) -> bool:
        """Whether the library computes a few rows, laid out as x is, of numbers that are known. One that fails is left out from then on."""
        if _recording(x.device):
            return False
        given = [_like(x[:_TRIAL_ROWS]), *(_like(other) if isinstance(other, torch.Tensor) else other for other in others)]
        try:
            off = _distance(getattr(library, op)(*given), getattr(reference, op)(*given))
            if not off <= _TRIAL_TOLERANCE:
                raise ArithmeticError(f"{op} is off by {off:.1%}")
        except Exception as error:
            leave_out(library.name, error)
            self._found = [other for other in self._found or () if other is not library]
            return False
        if not any(tried[:2] == kind[:2] for tried in self._tried):
            logger.info("%s computes %s", library.name, op)
        self._tried.add(kind)
        return True


def _recording(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """Numbers from -3 to 3 in the layout of `tensor`."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return made.copy_(torch.linspace(-3, 3, made.numel()).view(made.shape))


def _distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    expected = expected.double()
    return float((actual.double() - expected).norm() / expected.norm())


_libraries = Libraries()


def launch_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    result = _libraries.compute("rms_norm", x, weight, eps)
    return triton_ops.rms_norm(x, weight, eps) if result is None else result


def launch_silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    result = _libraries.compute("silu_and_mul", x)
    return triton_ops.silu_and_mul(x) if result is None else result


def _rms_norm_meta(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x.new_empty(x.shape)


def _add_rms_norm_meta(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _silu_and_mul_meta(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // 2)


def _rotary_embedding_meta(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


# The libraries' fused add and norm writes over both its inputs, and their rotation wants other angles: these two are Triton's.
for _signature, _launch, _meta in (
    ("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", launch_rms_norm, _rms_norm_meta),
    (
        "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
        triton_ops.add_rms_norm,
        _add_rms_norm_meta,
    ),
    ("silu_and_mul(Tensor x) -> Tensor", launch_silu_and_mul, _silu_and_mul_meta),
    ("rotary_embedding(Tensor x, Tensor cos, Tensor signed_sin) -> Tensor", triton_ops.rotary_embedding, _rotary_embedding_meta),
):
    _LIBRARY.define(_signature)  # type: ignore[no-untyped-call]
    _LIBRARY.impl(_signature.partition("(")[0], _launch, "CUDA")  # type: ignore[no-untyped-call]
    _LIBRARY.impl(_signature.partition("(")[0], _meta, "Meta")  # type: ignore[no-untyped-call]

rms_norm = torch.ops.piecework.rms_norm.default
add_rms_norm = torch.ops.piecework.add_rms_norm.default
silu_and_mul = torch.ops.piecework.silu_and_mul.default
rotary_embedding = torch.ops.piecework.rotary_embedding.default
argmax = reference.argmax
sample_filtered = triton_ops.sample_filtered
"""No op of torch, as what samples is not traced."""
