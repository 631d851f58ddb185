"""The steps of layers with a recurrent state, in Triton. Signatures and meaning are those of
`kernels.recurrent_steps`.
"""

from __future__ import annotations

import torch

from ..recurrent_steps import DeltaWeights, Mamba2Weights, States, rows_of_numbers
from .recurrent_kernels import conv_step_kernel, delta_step_kernel, ssd_step_kernel
from .tiles import power_of_2

_CHANNELS = 256
_STATE = 4096  # About how many numbers of a state a program has.


def conv_step(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """See `recurrent_steps.conv_step`."""
    return _convolved(x, weight, bias, states, slots, silu=False)


def mamba2_step(
    x: torch.Tensor,
    dt: torch.Tensor,
    weights: Mamba2Weights,
    states: States,
    slots: torch.Tensor,
) -> torch.Tensor:
    """See `recurrent_steps.mamba2_step`."""
    conv = _convolved(x, weights.conv, weights.conv_bias, states.conv, slots, silu=True)
    _, heads, size, numbers = states.recurrent.shape
    out = conv.new_empty(len(x), heads * size)
    rows, columns = _tile(size, numbers)
    dt = rows_of_numbers(dt)
    if len(x):
        ssd_step_kernel[(len(x), heads, -(-size // rows))](
            conv,
            dt,
            weights.a,
            weights.d,
            weights.dt_bias,
            states.recurrent,
            slots,
            out,
            conv.shape[1],
            dt.stride(0),
            heads,
            (conv.shape[1] - heads * size) // (2 * numbers),
            size,
            numbers,
            *weights.dt_limits,
            BLOCK_P=rows,
            BLOCK_N=columns,
        )
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
    conv = _convolved(x, weights.conv, None, states.conv, slots, silu=True)
    _, heads, numbers, size = states.recurrent.shape
    out = conv.new_empty(len(x), heads * size)
    columns, rows = _tile(size, numbers)
    b, a = rows_of_numbers(b), rows_of_numbers(a)
    if len(x):
        delta_step_kernel[(len(x), heads, -(-size // columns))](
            conv,
            b,
            a,
            weights.a,
            weights.dt_bias,
            states.recurrent,
            slots,
            out,
            conv.shape[1],
            b.stride(0),
            a.stride(0),
            heads,
            (conv.shape[1] - heads * size) // (2 * numbers),
            size,
            numbers,
            weights.most_written,
            DECAYS=weights.decays,
            BLOCK_P=columns,
            BLOCK_N=rows,
        )
    return out


def _tile(size: int, numbers: int) -> tuple[int, int]:
    """Return how many of a head's `size` a program has, and all its `numbers`, as powers of two."""
    whole = power_of_2(numbers)
    return min(power_of_2(size), max(1, _STATE // whole)), whole


def _convolved(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    slots: torch.Tensor,
    *,
    silu: bool,
) -> torch.Tensor:
    """Return the convolution [T, C] float32."""
    assert x.stride(1) == 1 and states.is_contiguous() and weight.is_contiguous()
    (tokens, channels), columns = x.shape, weight.shape[1]
    out = torch.empty(tokens, channels, dtype=torch.float32, device=x.device)
    if tokens:
        conv_step_kernel[(tokens, -(-channels // _CHANNELS))](
            x,
            states,
            weight,
            weight if bias is None else bias,
            slots,
            out,
            x.stride(0),
            channels,
            COLUMNS=columns,
            HAS_BIAS=bias is not None,
            SILU=silu,
            BLOCK=_CHANNELS,
        )
    return out
