"""Triton kernels of the steps of layers with a recurrent state (`kernels.recurrent_steps`). States
are read and written once. Those of slot 0, which belongs to padding, are not written.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """Return log(1 + e^x), by the first terms of its series where 1 + e^x would round."""
    grown = tl.exp(tl.minimum(x, 20.0))
    result = tl.where(grown < 1e-3, grown - 0.5 * grown * grown, tl.log(1.0 + grown))
    return tl.where(x > 20.0, x, result)


@triton.jit
def conv_step_kernel(
    x,
    states,
    weight,
    bias,
    slots,
    out,
    x_stride,
    channels,
    COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (t, c): BLOCK channels of token t. states [slots, COLUMNS - 1, channels]."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = channel < channels
    slot = tl.load(slots + token)
    tail = states + slot * ((COLUMNS - 1) * channels) + channel
    taps = weight + channel * COLUMNS
    new = tl.load(x + token * x_stride + channel, mask=live, other=0.0)
    result = new.to(tl.float32) * tl.load(taps + (COLUMNS - 1), mask=live, other=0.0)
    if HAS_BIAS:
        result += tl.load(bias + channel, mask=live, other=0.0)
    for column in tl.static_range(COLUMNS - 1):
        old = tl.load(tail + column * channels, mask=live, other=0.0)
        result += old.to(tl.float32) * tl.load(taps + column, mask=live, other=0.0)
        if column > 0:
            tl.store(tail + (column - 1) * channels, old, mask=live & (slot != 0))
    if COLUMNS > 1:
        tl.store(tail + (COLUMNS - 2) * channels, new, mask=live & (slot != 0))
    if SILU:
        result = result / (1.0 + tl.exp(-result))
    tl.store(out + token * channels + channel, result, mask=live)


@triton.jit
def ssd_step_kernel(
    conv,
    dt,
    a,
    d,
    dt_bias,
    states,
    slots,
    out,
    channels,
    dt_stride,
    heads,
    groups,
    size,
    numbers,
    least_dt,
    most_dt,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program (t, h, p): BLOCK_P rows of head h's state [size, numbers], of token t."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    column = tl.arange(0, BLOCK_N)
    has_row, has_column = row < size, column < numbers
    live = has_row[:, None] & has_column[None]
    slot = tl.load(slots + token)
    inner, group = heads * size, head // (heads // groups)
    given = conv + token * channels
    x = tl.load(given + head * size + row, mask=has_row, other=0.0)
    of_group = given + inner + group * numbers + column
    b = tl.load(of_group, mask=has_column, other=0.0)
    c = tl.load(of_group + groups * numbers, mask=has_column, other=0.0)
    raw = tl.load(dt + token * dt_stride + head).to(tl.float32) + tl.load(dt_bias + head)
    step = tl.minimum(tl.maximum(softplus(raw), least_dt), most_dt)
    place = states + (slot * heads + head) * size * numbers
    place += row[:, None] * numbers + column[None]
    state = tl.load(place, mask=live, other=0.0) * tl.exp(step * tl.load(a + head))
    state += (step * x)[:, None] * b[None]
    tl.store(place, state, mask=live & (slot != 0))
    result = tl.sum(state * c[None], 1) + tl.load(d + head) * x
    tl.store(out + token * inner + head * size + row, result, mask=has_row)


@triton.jit
def delta_step_kernel(
    conv,
    b,
    gate,
    a,
    dt_bias,
    states,
    slots,
    out,
    channels,
    b_stride,
    gate_stride,
    heads,
    groups,
    size,
    numbers,
    most_written,
    DECAYS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program (t, h, p): BLOCK_P columns of head h's state [numbers, size], of token t. DECAYS is
    1, or `numbers` if each row has its own decay.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    row = tl.arange(0, BLOCK_N)
    has_row, has_column = row < numbers, column < size
    live = has_row[:, None] & has_column[None]
    slot = tl.load(slots + token)
    group = head // (heads // groups)
    given = conv + token * channels
    q = tl.load(given + group * numbers + row, mask=has_row, other=0.0)
    k = tl.load(given + (groups + group) * numbers + row, mask=has_row, other=0.0)
    v = tl.load(given + 2 * groups * numbers + head * size + column, mask=has_column, other=0.0)
    q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * tl.rsqrt(numbers + 0.0)
    k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
    beta = most_written / (1.0 + tl.exp(-tl.load(b + token * b_stride + head).to(tl.float32)))
    own = head * DECAYS + (row if DECAYS > 1 else row * 0)
    raw = tl.load(gate + token * gate_stride + own, mask=has_row, other=0.0).to(tl.float32)
    raw += tl.load(dt_bias + own, mask=has_row, other=0.0)
    decay = tl.exp(tl.load(a + head) * softplus(raw))
    place = states + (slot * heads + head) * numbers * size
    place += row[:, None] * size + column[None]
    state = tl.load(place, mask=live, other=0.0) * decay[:, None]
    change = beta * (v - tl.sum(state * k[:, None], 0))
    state += k[:, None] * change[None]
    tl.store(place, state, mask=live & (slot != 0))
    result = tl.sum(state * q[:, None], 0)
    tl.store(out + (token * heads + head) * size + column, result, mask=has_column)
