"""Layers with a recurrent state by the C++ kernels (`recurrent*.cpp`), for activations in bfloat16
and float32.

`kernels.recurrent_steps` and `kernels.recurrent_prompts` define the functions, and compute other
dtypes.
"""

from __future__ import annotations

import ctypes

import torch

from ... import recurrent_prompts, recurrent_steps
from ...recurrent_steps import DeltaWeights, Mamba2Weights, ScanWeights, States, rows_of_numbers
from ...state_plan import Prompts
from .build import load_part
from .parts import RECURRENT
from .quantize import pointers

_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
_DTYPES = (torch.bfloat16, torch.float32)
# Tokens whose convolution results are kept at a time: twice those of a part of a prompt.
_PART = 512


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
        *((name, _INT) for name in ("heads", "groups", "size", "numbers", "decays")),
        *((name, _FLOAT) for name in ("least_dt", "most_dt", "most_written")),
    ]


class _Prompts(ctypes.Structure):
    _fields_ = [
        *((name, _POINTER) for name in ("begins", "lens", "room")),
        *((name, _INT) for name in ("count", "capacity")),
    ]


class _Scan(ctypes.Structure):
    _fields_ = [
        *((name, _POINTER) for name in ("states", "x", "dt", "b", "c", "a", "d", "dt_bias", "out")),
        *((name, _POINTER) for name in ("slots", "begins", "lens")),
        *((name, _LONG) for name in ("x_stride", "dt_stride", "b_stride", "c_stride")),
        *((name, _INT) for name in ("count", "channels", "groups", "numbers")),
    ]


def conv_step(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """See `recurrent_steps.conv_step`."""
    library = load_part(RECURRENT)
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
    """See `recurrent_steps.mamba2_step`."""
    library = load_part(RECURRENT)
    if library is None or not _takes(x, states.conv) or dt.dtype != x.dtype:
        return recurrent_steps.mamba2_step(x, dt, weights, states, slots)
    conv, _kept = _conv(x, weights.conv, weights.conv_bias, states.conv, slots, silu=True)
    _, heads, size, _ = states.recurrent.shape
    out = torch.empty(len(x), heads * size, dtype=torch.float32)
    call, _numbers = _mamba2_heads(x, dt, weights, states.recurrent, out)
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
    """See `recurrent_steps.gated_delta_step`."""
    library = load_part(RECURRENT)
    if library is None or not _takes(x, states.conv) or not b.dtype == a.dtype == x.dtype:
        return recurrent_steps.gated_delta_step(x, b, a, weights, states, slots)
    conv, _kept = _conv(x, weights.conv, None, states.conv, slots, silu=True)
    _, heads, _, size = states.recurrent.shape
    out = torch.empty(len(x), heads * size, dtype=torch.float32)
    call, _numbers = _delta_heads(x, b, a, weights, states.recurrent, out)
    library.piecework_gated_delta_step(ctypes.byref(conv), ctypes.byref(call), *_how(x))
    return out


def selective_scan_step(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    weights: ScanWeights,
    states: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """See `recurrent_steps.selective_scan_step`."""
    library = load_part(RECURRENT)
    if library is None or not all(_takes(x, each) for each in (dt, b, c)):
        return recurrent_steps.selective_scan_step(x, dt, b, c, weights, states, slots)
    out = torch.empty(x.shape, dtype=torch.float32)
    call, _numbers = _scan((x, dt, b, c), weights, states, out, slots, None)
    library.piecework_selective_scan(ctypes.byref(call), *_how(x))
    return out


def conv_prompts(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    states: torch.Tensor,
    prompts: Prompts,
) -> None:
    """See `recurrent_prompts.conv_prompts`."""
    library = load_part(RECURRENT)
    if library is None or not _takes(x, states) or not _takes(x, out):
        return recurrent_prompts.conv_prompts(x, weight, bias, out, states, prompts)
    conv, _ = _conv(x, weight, bias, states, prompts.slots, silu=False, out=out)
    call, _room = _prompts(x, prompts, has_heads=False)
    library.piecework_conv_prompts(ctypes.byref(conv), ctypes.byref(call), *_how(x))


def mamba2_prompts(
    x: torch.Tensor,
    dt: torch.Tensor,
    weights: Mamba2Weights,
    out: torch.Tensor,
    states: States,
    prompts: Prompts,
) -> None:
    """See `recurrent_prompts.mamba2_prompts`."""
    library = load_part(RECURRENT)
    if library is None or not all(_takes(x, each) for each in (states.conv, dt, out)):
        return recurrent_prompts.mamba2_prompts(x, dt, weights, out, states, prompts)
    bias = weights.conv_bias
    conv, _ = _conv(x, weights.conv, bias, states.conv, prompts.slots, silu=True, out=out)
    call, _numbers = _mamba2_heads(x, dt, weights, states.recurrent, out)
    of_prompts, _room = _prompts(x, prompts)
    where = (ctypes.byref(conv), ctypes.byref(call), ctypes.byref(of_prompts))
    library.piecework_mamba2_prompts(*where, *_how(x))


def gated_delta_prompts(
    x: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    weights: DeltaWeights,
    out: torch.Tensor,
    states: States,
    prompts: Prompts,
) -> None:
    """See `recurrent_prompts.gated_delta_prompts`."""
    library = load_part(RECURRENT)
    if library is None or not all(_takes(x, each) for each in (states.conv, b, a, out)):
        return recurrent_prompts.gated_delta_prompts(x, b, a, weights, out, states, prompts)
    conv, _ = _conv(x, weights.conv, None, states.conv, prompts.slots, silu=True, out=out)
    call, _numbers = _delta_heads(x, b, a, weights, states.recurrent, out)
    of_prompts, _room = _prompts(x, prompts)
    where = (ctypes.byref(conv), ctypes.byref(call), ctypes.byref(of_prompts))
    library.piecework_gated_delta_prompts(*where, *_how(x))


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
    """See `recurrent_prompts.selective_scan_prompts`."""
    library = load_part(RECURRENT)
    if library is None or not all(_takes(x, each) for each in (dt, b, c, out)):
        given = x, dt, b, c, weights, out, states, prompts
        return recurrent_prompts.selective_scan_prompts(*given)
    call, _numbers = _scan((x, dt, b, c), weights, states, out, prompts.slots, prompts)
    library.piecework_selective_scan(ctypes.byref(call), *_how(x))


def _scan(
    inputs: tuple[torch.Tensor, ...],
    weights: ScanWeights,
    states: torch.Tensor,
    out: torch.Tensor,
    slots: torch.Tensor,
    prompts: Prompts | None,
) -> tuple[_Scan, tuple[torch.Tensor, ...]]:
    """Return the call, and the tensors that it reads and that must stay alive. `inputs` are x, dt,
    b and c.
    """
    assert out.is_contiguous() and states.is_contiguous() and slots.dtype == torch.int64
    assert all(each.is_contiguous() and each.dtype == torch.float32 for each in weights)
    inputs = tuple(map(rows_of_numbers, inputs))
    _, channels, numbers = states.shape
    where = pointers(states, *inputs, *weights, out, slots)
    spans = (None, None) if prompts is None else [each.ctypes.data for each in prompts.spans]
    strides = (each.stride(0) for each in inputs)
    sizes = (len(slots), channels, inputs[2].shape[1] // numbers, numbers)
    return _Scan(*where, *spans, *strides, *sizes), inputs


def _takes(x: torch.Tensor, other: torch.Tensor) -> bool:
    return x.dtype in _DTYPES and x.dtype == other.dtype


def _conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    slots: torch.Tensor,
    *,
    silu: bool,
    out: torch.Tensor | None = None,
) -> tuple[_Conv, torch.Tensor]:
    """Return the call and its output, which is a new tensor if `out` is None."""
    assert x.stride(1) == 1 and states.is_contiguous() and weight.is_contiguous()
    assert weight.dtype == torch.float32 and slots.dtype == torch.int64
    (tokens, channels), columns = x.shape, weight.shape[1]
    if out is None:
        out = torch.empty(tokens, channels, dtype=torch.float32)
    assert out.is_contiguous()
    where = pointers(x, states, weight, bias, slots, out)
    return _Conv(*where, x.stride(0), tokens, channels, columns, silu), out


def _mamba2_heads(
    x: torch.Tensor,
    dt: torch.Tensor,
    weights: Mamba2Weights,
    states: torch.Tensor,
    out: torch.Tensor,
) -> tuple[_Heads, torch.Tensor]:
    """Return the call, and the tensor that it reads and that must stay alive."""
    assert out.is_contiguous() and states.is_contiguous()
    dt = rows_of_numbers(dt)
    _, heads, size, numbers = states.shape
    groups = (x.shape[1] - heads * size) // (2 * numbers)
    where = pointers(states, dt, None, weights.a, weights.d, weights.dt_bias, out)
    sizes = (heads, groups, size, numbers, 1)
    return _Heads(*where, dt.stride(0), 0, *sizes, *weights.dt_limits, 1.0), dt


def _delta_heads(
    x: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    weights: DeltaWeights,
    states: torch.Tensor,
    out: torch.Tensor,
) -> tuple[_Heads, tuple[torch.Tensor, ...]]:
    """Return the same for the gated delta rule."""
    assert out.is_contiguous() and states.is_contiguous()
    b, a = rows_of_numbers(b), rows_of_numbers(a)
    _, heads, numbers, size = states.shape
    groups = (x.shape[1] - heads * size) // (2 * numbers)
    where = pointers(states, b, a, weights.a, None, weights.dt_bias, out)
    sizes = (heads, groups, size, numbers, weights.decays)
    return _Heads(*where, b.stride(0), a.stride(0), *sizes, 0.0, 0.0, weights.most_written), (b, a)


def _prompts(
    x: torch.Tensor, prompts: Prompts, *, has_heads: bool = True
) -> tuple[_Prompts, torch.Tensor]:
    """Return the call, and a buffer for the results of its convolutions, which the heads read."""
    begins, lens = prompts.spans
    capacity = min(_PART, sum(prompts.lens))
    room = torch.empty(capacity if has_heads else 0, x.shape[1], dtype=torch.float32)
    where = (begins.ctypes.data, lens.ctypes.data, room.data_ptr())
    return _Prompts(*where, len(lens), capacity), room


def _how(x: torch.Tensor) -> tuple[int, int]:
    return int(x.dtype == torch.bfloat16), torch.get_num_threads()
