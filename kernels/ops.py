"""The ops that layers call: plain torch, or what a platform has registered for its device.

The ops of models are traced as ops of torch, `piecework::rms_norm` and its like, on every device:
passes see one functional node, and no kernel's launch. `kernels.reference` is what they compute
where no platform has put a kernel of its own in its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from . import reference

_versions: dict[str, Any] = {}
_LIBRARY = torch.library.Library("piecework", "FRAGMENT")  # type: ignore[no-untyped-call]


def _like_first(x: torch.Tensor, *others: Any) -> torch.Tensor:
    return x.new_empty(x.shape)


TRACED = {
    "rms_norm": ("(Tensor x, Tensor weight, float eps) -> Tensor", _like_first),
    "add_rms_norm": (
        "(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
        lambda x, *others: (x.new_empty(x.shape), x.new_empty(x.shape)),
    ),
    "silu_and_mul": (
        "(Tensor x) -> Tensor",
        lambda x: x.new_empty(*x.shape[:-1], x.shape[-1] // 2),
    ),
    "rotary_embedding": ("(Tensor x, Tensor cos, Tensor signed_sin) -> Tensor", _like_first),
}
"""Ops that a traced forward holds as nodes: their signatures, and the results' kinds."""

for _name, (_signature, _meta) in TRACED.items():
    _LIBRARY.define(_name + _signature)  # type: ignore[no-untyped-call]
    _LIBRARY.impl(_name, getattr(reference, _name), "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    _LIBRARY.impl(_name, _meta, "Meta")  # type: ignore[no-untyped-call]


def _version(op: str, x: torch.Tensor) -> Any:
    """What computes an op on tensors like `x`."""
    if torch.compiler.is_dynamo_compiling():
        return getattr(torch.ops.piecework, op).default
    return getattr(_versions.get(x.device.type, reference), op)


def register(device_type: str, version: Any) -> None:
    """From now on, tensors of this device go through `version`, which has every op of
    `reference`.
    """
    _versions[device_type] = version


@contextmanager
def plain_torch() -> Iterator[None]:
    """Inside the block every op is `reference`'s, whatever is registered."""
    global _versions
    registered, _versions = _versions, {}
    try:
        yield
    finally:
        _versions = registered


def has_kernel(device_type: str, op: str) -> bool:
    """Whether a version other than plain torch is registered for the op."""
    plain = getattr(reference, op)
    return getattr(_versions.get(device_type, reference), op, plain) is not plain


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    result: torch.Tensor = _version("rms_norm", x)(x, weight, eps)
    return result


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    result: tuple[torch.Tensor, torch.Tensor] = _version("add_rms_norm", x)(
        x, residual, weight, eps
    )
    return result


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _version("silu_and_mul", x)(x)
    return result


def rotary_embedding(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _version("rotary_embedding", x)(x, cos, signed_sin)
    return result


def argmax(logits: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _versions.get(logits.device.type, reference).argmax(logits)
    return result


def sample_filtered(
    probs: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    result: torch.Tensor = _versions.get(probs.device.type, reference).sample_filtered(
        probs, top_k, top_p, min_p, uniform
    )
    return result


def uniform_dtype(device_type: str) -> type[np.floating[Any]]:
    """In which the device takes the numbers of `sample_filtered`; in float32 they must be multiples
    of 2^-24, and so below 1.
    """
    dtype: type[np.floating[Any]] = getattr(
        _versions.get(device_type, reference), "UNIFORM_DTYPE", reference.UNIFORM_DTYPE
    )
    return dtype
