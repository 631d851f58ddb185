"""The ops that layers call. They run in plain torch, or by a kernel that the platform registered.

Ops of models are traced as ops of torch, such as `piecework::rms_norm`, on every device. Compiler
passes therefore see one functional node and no kernel launch. `kernels.reference` defines what each
op computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from . import plain_sampling, recurrent_prompts, recurrent_steps, reference
from .op_signatures import PRODUCTS as PRODUCTS
from .op_signatures import TRACED as TRACED
from .recurrent_steps import DeltaWeights, Mamba2Weights, ScanWeights, States
from .state_plan import Prompts

_versions: dict[str, Any] = {}
_LIBRARY = torch.library.Library("piecework", "FRAGMENT")  # type: ignore[no-untyped-call]


def _version(op: str, x: torch.Tensor) -> Any:
    """Return the function that computes an op on tensors like `x`."""
    if torch.compiler.is_dynamo_compiling():
        return getattr(torch.ops.piecework, op).default
    return getattr(_versions.get(x.device.type, reference), op, getattr(reference, op))


def _as_untraced(name: str) -> Any:
    """Return the op for traced forwards. It computes the same as without tracing."""

    def op(x: torch.Tensor, *others: Any) -> Any:
        return _version(name, x)(x, *others)

    return op


for _name, (_signature, _meta) in TRACED.items():
    _LIBRARY.define(_name + _signature)  # type: ignore[no-untyped-call]
    _LIBRARY.impl(_name, _as_untraced(_name), "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    _LIBRARY.impl(_name, _meta, "Meta")  # type: ignore[no-untyped-call]


quantize_fp4 = _as_untraced("quantize_fp4")
fp4_linear = _as_untraced("fp4_linear")
lora = _as_untraced("lora")


def register(device_type: str, version: Any) -> None:
    """Use the functions of `version` in place of `reference` for tensors of this device."""
    _versions[device_type] = version


@contextmanager
def plain_torch() -> Iterator[None]:
    """Use only the functions of `reference` inside the block, whatever is registered."""
    global _versions
    registered, _versions = _versions, {}
    try:
        yield
    finally:
        _versions = registered


def has_kernel(device_type: str, op: str, dtype: torch.dtype | None = None) -> bool:
    """Return whether a kernel is registered for the op, and, if `dtype` is given, takes activations
    of that dtype. A version that supports only some dtypes lists them as `DTYPES`.
    """
    plain, version = getattr(reference, op), _versions.get(device_type, reference)
    taken = dtype is None or dtype in getattr(version, "DTYPES", (dtype,))
    return taken and getattr(version, op, plain) is not plain


def fp4_obstacle(device: torch.device) -> str | None:
    """Return why a device does not multiply activations of 4 bits, or None if it does."""
    check = getattr(_versions.get(device.type), "fp4_obstacle", None)
    if check is None:
        return f"{device.type} has no kernel"
    reason: str | None = check(device)
    return reason


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


def quantize_static(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    result: torch.Tensor = _version("quantize_static", x)(x, scale, dtype)
    return result


def quantize_dynamic(
    x: torch.Tensor, group: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    result: tuple[torch.Tensor, torch.Tensor] = _version("quantize_dynamic", x)(x, group, dtype)
    return result


def scaled_linear(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    result: torch.Tensor = _version("scaled_linear", x)(
        x, x_scale, weight, weight_scale, bias, dtype
    )
    return result


def weight_only_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    bias: torch.Tensor | None,
    bits: int,
) -> torch.Tensor:
    result: torch.Tensor = _version("weight_only_linear", x)(x, weight, scale, zero, bias, bits)
    return result


def fused_moe(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down: torch.Tensor,
    down_bias: torch.Tensor | None,
    limit: float,
    weighs_input: bool,
) -> torch.Tensor:
    result: torch.Tensor = _version("fused_moe", x)(
        x, topk_ids, topk_weights, gate_up, gate_up_bias, down, down_bias, limit, weighs_input
    )
    return result


def choose_experts(
    logits: torch.Tensor,
    correction: torch.Tensor | None,
    top_k: int,
    sigmoid: bool,
    renormalized: bool,
    groups: int,
    top_groups: int,
    group_best: int,
    scale: float,
    least_sum: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    result: tuple[torch.Tensor, torch.Tensor] = _version("choose_experts", logits)(
        logits,
        correction,
        top_k,
        sigmoid,
        renormalized,
        groups,
        top_groups,
        group_best,
        scale,
        least_sum,
    )
    return result


def _version_of(plain: Any, x: torch.Tensor) -> Any:
    """Return the version of a function that is not part of traced forwards."""
    return getattr(_versions.get(x.device.type), plain.__name__, plain)


def conv_step(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    result: torch.Tensor = _version_of(recurrent_steps.conv_step, x)(x, weight, bias, states, slots)
    return result


def mamba2_step(
    x: torch.Tensor,
    dt: torch.Tensor,
    weights: Mamba2Weights,
    states: States,
    slots: torch.Tensor,
) -> torch.Tensor:
    result: torch.Tensor = _version_of(recurrent_steps.mamba2_step, x)(
        x, dt, weights, states, slots
    )
    return result


def gated_delta_step(
    x: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    weights: DeltaWeights,
    states: States,
    slots: torch.Tensor,
) -> torch.Tensor:
    result: torch.Tensor = _version_of(recurrent_steps.gated_delta_step, x)(
        x, b, a, weights, states, slots
    )
    return result


def selective_scan_step(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    weights: ScanWeights,
    states: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    result: torch.Tensor = _version_of(recurrent_steps.selective_scan_step, x)(
        x, dt, b, c, weights, states, slots
    )
    return result


def conv_prompts(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    states: torch.Tensor,
    prompts: Prompts,
) -> None:
    _version_of(recurrent_prompts.conv_prompts, x)(x, weight, bias, out, states, prompts)


def mamba2_prompts(
    x: torch.Tensor,
    dt: torch.Tensor,
    weights: Mamba2Weights,
    out: torch.Tensor,
    states: States,
    prompts: Prompts,
) -> None:
    _version_of(recurrent_prompts.mamba2_prompts, x)(x, dt, weights, out, states, prompts)


def gated_delta_prompts(
    x: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    weights: DeltaWeights,
    out: torch.Tensor,
    states: States,
    prompts: Prompts,
) -> None:
    _version_of(recurrent_prompts.gated_delta_prompts, x)(x, b, a, weights, out, states, prompts)


def selective_scan_prompts(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    weights: ScanWeights,
    out: torch.Tensor,
    states: torch.Tensor,
    prompts: Prompts,
) -> None:
    _version_of(recurrent_prompts.selective_scan_prompts, x)(
        x, dt, b, c, weights, out, states, prompts
    )


def attend_all(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    result: torch.Tensor = _version("attend_all", q)(q, k, v, scale)
    return result


def argmax(logits: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _version("argmax", logits)(logits)
    return result


def mask_logits(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    _version("mask_logits", logits)(logits, rows, bits)


def softmax(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _version_of(plain_sampling.softmax, logits)(logits, temperature)
    return result


def sample_plain(
    logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor
) -> torch.Tensor:
    version = _version_of(plain_sampling.sample_plain, logits)
    result: torch.Tensor = version(logits, temperature, uniform)
    return result


def sample_filtered(
    probs: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    result: torch.Tensor = _version("sample_filtered", probs)(probs, top_k, top_p, min_p, uniform)
    return result


def uniform_dtype(device_type: str) -> type[np.floating[Any]]:
    """Return the dtype in which the device takes the random numbers of `sample_filtered`. In
    float32 these must be multiples of 2^-24 below 1.
    """
    dtype: type[np.floating[Any]] = getattr(
        _versions.get(device_type, reference), "UNIFORM_DTYPE", reference.UNIFORM_DTYPE
    )
    return dtype
