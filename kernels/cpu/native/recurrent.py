"""Steps of layers with a recurrent state by the C++ kernels (recurrent.cpp), for activations of
bfloat16 and float32; others go to `kernels.recurrent_steps`, which says what they compute.
"""

from __future__ import annotations

import ctypes

import torch

from ... import recurrent_steps
from ...recurrent_steps import DeltaWeights, Mamba2Weights, States, rows_of_numbers
from .build import load_kernels

_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
_DTYPES = (torch.bfloat16, torch.float32)


class _Conv(ctypes.Structure):
    _fields_ = [
        *((name, _POINTER) for name in ("x", "states", "weight", "bias", "slots", "out")),
        ("stride", _LONG),
        *((name, _INT) for name in ("tokens", "channels", "columns", "silu")),
    ]


class _Heads(ctypes.Structure):
    _fields_ = [
        *((name, _POINTER) for name in ("states", "first", "second", "a", "d", "dt_bias", "out")),
        *((name, _LONG) for name in ("first_stride", "second_stride")),
        *((name, _INT) for name in ("heads", "groups", "size", "numbers")),
        *((name, _FLOAT) for name in ("least_dt", "most_dt")),
    ]


def conv_step(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """As `recurrent_steps.conv_step`."""
    library = load_kernels()
    if library is None or not _takes(x, states):
        return recurrent_steps.conv_step(x, weight, bias, states, slots)
    conv, out = _conv(x, weight, bias, states, slots, silu=False)
    library.piecework_conv_step(ctypes.byref(conv), *_how(x))
    return out


def mamba2_step(
    x: torch.Tensor,
    dt: torch.Tensor,
    weights: Mamba2Weights,
    states: States,
    slots: torch.Tensor,
) -> torch.Tensor:
    """As `recurrent_steps.mamba2_step`."""
    library = load_kernels()
    if library is None or not _takes(x, states.conv) or dt.dtype != x.dtype:
        return recurrent_steps.mamba2_step(x, dt, weights, states, slots)
    dt = rows_of_numbers(dt)
    conv, _kept = _conv(x, weights.conv, weights.conv_bias, states.conv, slots, silu=True)
    _, heads, size, numbers = states.recurrent.shape
    out = torch.empty(len(x), heads * size, dtype=torch.float32)
    groups = (x.shape[1] - heads * size) // (2 * numbers)
    call = _Heads(
        *map(_at, (states.recurrent, dt, None, weights.a, weights.d, weights.dt_bias, out)),
        *(dt.stride(0), 0, heads, groups, size, numbers, *weights.dt_limits),
    )
    library.piecework_mamba2_step(ctypes.byref(conv), ctypes.byref(call), *_how(x))
    return out


def gated_delta_step(
    x: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    weights: DeltaWeights,
    states: States,
    slots: torch.Tensor,
) -> torch.Tensor:
    """As `recurrent_steps.gated_delta_step`."""
    library = load_kernels()
    if library is None or not _takes(x, states.conv) or not b.dtype == a.dtype == x.dtype:
        return recurrent_steps.gated_delta_step(x, b, a, weights, states, slots)
    b, a = rows_of_numbers(b), rows_of_numbers(a)
    conv, _kept = _conv(x, weights.conv, None, states.conv, slots, silu=True)
    _, heads, numbers, size = states.recurrent.shape
    out = torch.empty(len(x), heads * size, dtype=torch.float32)
    groups = (x.shape[1] - heads * size) // (2 * numbers)
    call = _Heads(
        *map(_at, (states.recurrent, b, a, weights.a, None, weights.dt_bias, out)),
        *(b.stride(0), a.stride(0), heads, groups, size, numbers, 0.0, 0.0),
    )
    library.piecework_gated_delta_step(ctypes.byref(conv), ctypes.byref(call), *_how(x))
    return out


def _takes(x: torch.Tensor, states: torch.Tensor) -> bool:
    return x.dtype in _DTYPES and x.dtype == states.dtype


def _conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    slots: torch.Tensor,
    *,
    silu: bool,
) -> tuple[_Conv, torch.Tensor]:
    """The call and what it writes."""
    assert x.stride(1) == 1 and states.is_contiguous() and weight.is_contiguous()
    assert weight.dtype == torch.float32 and slots.dtype == torch.int64
    (tokens, channels), columns = x.shape, weight.shape[1]
    out = torch.empty(tokens, channels, dtype=torch.float32)
    pointers = map(_at, (x, states, weight, bias, slots, out))
    return _Conv(*pointers, x.stride(0), tokens, channels, columns, silu), out


def _at(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _how(x: torch.Tensor) -> tuple[int, int]:
    return int(x.dtype == torch.bfloat16), torch.get_num_threads()
