"""The ops that layers call: plain torch, or what a platform has registered for its device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from . import reference

_versions: dict[str, Any] = {}


def register(device_type: str, version: Any) -> None:
    """From now on, tensors of this device go through `version`, which has every op of
    `reference`.
    """
    _versions[device_type] = version


@contextmanager
def plain_torch() -> Iterator[None]:
    """Inside the block every op is `reference`'s, whatever is registered: for a compiler that fuses
    what it can look into.
    """
    global _versions
    registered, _versions = _versions, {}
    try:
        yield
    finally:
        _versions = registered


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    result: torch.Tensor = _versions.get(x.device.type, reference).rms_norm(x, weight, eps)
    return result


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    result: tuple[torch.Tensor, torch.Tensor] = _versions.get(
        x.device.type, reference
    ).add_rms_norm(x, residual, weight, eps)
    return result


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _versions.get(x.device.type, reference).silu_and_mul(x)
    return result


def rotary_embedding(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _versions.get(x.device.type, reference).rotary_embedding(
        x, cos, signed_sin
    )
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
