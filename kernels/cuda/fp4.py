"""The ops of NVFP4 activations on GPUs whose matrix instructions multiply 4 bits, by flashinfer."""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from typing import Any

import torch

from ..fp4 import E4M3, tiled_shape
from . import fp4_products
from .libraries import has_flashinfer
from .products import capability
from .trial_process import TRIALS
from .trials import described

logger = logging.getLogger(__name__)

MAJORS = (10, 12)  # Compute capabilities that multiply 4 bits.
_TRIAL = (256, 512)  # Rows and columns of the weight of a trial.

has_library = cache(has_flashinfer)


@cache
def obstacle(device: torch.device) -> str | None:
    """Return why this device does not multiply 4 bits by 4 bits, or None if it does. The first call
    tries a product in the process of the trials.
    """
    major, minor = capability(device)
    if major not in MAJORS:
        return f"compute capability {major}.{minor} does not multiply 4 bits"
    reason = trial_failure("fp4_layer") if has_library() else "flashinfer is not installed"
    if reason is not None:
        logger.warning("activations of NVFP4 checkpoints stay in 16 bits: %s", reason)
    elif (failure := trial_failure("fp4_gated_layer")) is not None:
        logger.info("flashinfer does not quantise gated activations to 4 bits: %s", failure)
    return reason


@cache
def trial_failure(call: str) -> str | None:
    """Return why flashinfer cannot compute a call of `kernels.reference`, or None if it can."""
    rows, columns = _TRIAL
    gates = 2 if call == "fp4_gated_layer" else 1
    x = torch.empty(160, gates * columns, dtype=torch.bfloat16, device="meta")
    weight = x.new_empty(rows, columns // 2, dtype=torch.uint8)
    scales = x.new_empty(tiled_shape(rows, columns // 16), dtype=E4M3)
    one = x.new_empty(1, dtype=torch.float32)
    given = (x, one, weight, scales, one, x.new_empty(rows), x.dtype)
    arguments = [described(each) for each in given]
    return TRIALS.failure({"library": "flashinfer", "call": call, "arguments": arguments})


def _library() -> Any:
    return import_module("flashinfer")


def quantize_fp4(x: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return fp4_products.quantize(_library(), x, factor)


def silu_and_mul_quantize_fp4(x: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if trial_failure("fp4_gated_layer") is not None:
        return quantize_fp4(torch.ops.piecework.silu_and_mul(x), factor)
    return fp4_products.silu_and_mul_quantize(_library(), x, factor)


def fp4_linear(*given: Any) -> torch.Tensor:
    return fp4_products.multiply(_library(), *given)
