"""One token per request through layers with a recurrent state, in plain torch. `ops` uses these
functions if the platform has no kernel.

Shapes: T tokens, each of another request, H heads of P numbers, N numbers of a state for each of
these, G groups of heads, K columns of a convolution over C channels. The states of a request lie at
its slot of `slots` [T] int64 and are changed in place. Slot 0 belongs to padding and stays zero.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F


class States(NamedTuple):
    """The states of requests.

    Attributes:
        conv: [slots, K - 1, C], the last tokens before a convolution, in the dtype of its input.
        recurrent: [slots, H, ...] float32.
    """

    conv: torch.Tensor
    recurrent: torch.Tensor


class Mamba2Weights(NamedTuple):
    """Weights of Mamba 2, all float32.

    `conv` is [C, K], `conv_bias` [C]; `a` (below 0), `d` and `dt_bias` are [H]. dt is clamped to
    `dt_limits`.
    """

    conv: torch.Tensor
    conv_bias: torch.Tensor | None
    a: torch.Tensor
    d: torch.Tensor
    dt_bias: torch.Tensor
    dt_limits: tuple[float, float]


class DeltaWeights(NamedTuple):
    """Weights of the gated delta rule, all float32.

    `conv` is [C, K], `a` (below 0) [H] and `dt_bias` [H * D]. The N numbers of a head share one
    decay (D = 1) or have one each (D = N). `most_written` is a factor of the sigmoid that says how
    much a token writes.
    """

    conv: torch.Tensor
    a: torch.Tensor
    dt_bias: torch.Tensor
    most_written: float = 1.0

    @property
    def decays(self) -> int:
        """D: the decays per head."""
        return len(self.dt_bias) // len(self.a)


class ScanWeights(NamedTuple):
    """Weights of the selective scan, all float32: `a` (below 0) [C, N], `d` and `dt_bias` [C]."""

    a: torch.Tensor
    d: torch.Tensor
    dt_bias: torch.Tensor


def rows_of_numbers(x: torch.Tensor) -> torch.Tensor:
    """Return x [T, H] with contiguous rows, as kernels need it. Rows of a projection that
    interleaves heads are not contiguous.
    """
    return x if x.stride(1) == 1 else x.contiguous()


def conv_step(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Return the convolution [T, C] float32 of each channel of x [T, C] over its last K tokens.
    weight [C, K] and bias [C] are float32.
    """
    rows = torch.cat((states.index_select(0, slots), x[:, None]), dim=1)
    put(states, slots, rows[:, 1:])
    result = (rows * weight.t()).sum(1)
    return result if bias is None else result + bias


def mamba2_step(
    x: torch.Tensor,
    dt: torch.Tensor,
    weights: Mamba2Weights,
    states: States,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Return `recurrent.mamba2`, [T, H * P] float32."""
    conv = conv_step(x, weights.conv, weights.conv_bias, states.conv, slots)
    x, b, c, dt = mamba2_inputs(conv, dt, weights, states)
    times = x.shape[1] // b.shape[1]
    b, c = b.repeat_interleave(times, 1), c.repeat_interleave(times, 1)
    state = states.recurrent.index_select(0, slots) * (dt * weights.a).exp()[..., None, None]
    state = torch.addcmul(state, (x * dt[..., None])[..., None], b[:, :, None])
    put(states.recurrent, slots, state)
    return torch.addcmul((state @ c[..., None]).squeeze(-1), x, weights.d[:, None]).flatten(1)


def gated_delta_step(
    x: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    weights: DeltaWeights,
    states: States,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Return `recurrent.gated_delta_net`, [T, H * P] float32."""
    conv = conv_step(x, weights.conv, None, states.conv, slots)
    return delta_step(conv, b, a, weights, states, slots)


def delta_step(
    conv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    weights: DeltaWeights,
    states: States,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Return what `gated_delta_step` returns, after the convolution."""
    q, k, v, decay, beta = delta_inputs(conv, b, a, weights, states)
    times = v.shape[1] // q.shape[1]
    q, k = q.repeat_interleave(times, 1), k.repeat_interleave(times, 1)
    state = states.recurrent.index_select(0, slots) * decay.exp()[..., None]
    change = (v - (k[:, :, None] @ state).squeeze(2)) * beta[..., None]
    state = torch.addcmul(state, k[..., None], change[:, :, None])
    put(states.recurrent, slots, state)
    return (q[:, :, None] @ state).squeeze(2).flatten(1)


def selective_scan_step(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    weights: ScanWeights,
    states: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Return `recurrent.selective_scan`, [T, C] float32."""
    x, dt, b, c = scan_inputs(x, dt, b, c, weights, states)
    state = states.index_select(0, slots) * (dt[..., None] * weights.a).exp()
    # [T, G, C / G, ..]
    by_group = state.view(*b.shape[:2], -1, b.shape[2])
    written = (x * dt).view(*b.shape[:2], -1)
    by_group.addcmul_(written[..., None], b[:, :, None])
    put(states, slots, state)
    return torch.addcmul((by_group @ c[..., None]).flatten(1), x, weights.d)


def put(states: torch.Tensor, slots: torch.Tensor, new: torch.Tensor) -> None:
    """Write `new` [T, ...] into `states` [slots, ...]. Slot 0, of padding, stays zero."""
    states.index_copy_(0, slots, new)
    states[0].zero_()


def mamba2_inputs(
    conv: torch.Tensor, dt: torch.Tensor, weights: Mamba2Weights, states: States
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split the result of a convolution [T, H * P + 2 * G * N] and dt [T, H] into x [T, H, P], b, c
    [T, G, N] and dt, all float32.
    """
    _, heads, size, numbers = states.recurrent.shape
    inner = heads * size
    x, b, c = F.silu(conv).tensor_split([inner, (inner + conv.shape[1]) // 2], dim=-1)
    dt = F.softplus(dt.float() + weights.dt_bias).clamp(*weights.dt_limits)
    tokens = len(x)
    return (
        x.view(tokens, heads, size),
        b.view(tokens, -1, numbers),
        c.view(tokens, -1, numbers),
        dt,
    )


_LEAST_SQUARES = 1e-6  # Added to the squared length of a key or query before dividing by its root.


def delta_inputs(
    conv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, weights: DeltaWeights, states: States
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split the result of a convolution [T, 2 * G * N + H * P], b [T, H] and a [T, H * D] into q, k
    [T, G, N], v [T, H, P], decay (below 0) [T, H, D] and beta [T, H], all float32.
    """
    _, heads, numbers, size = states.recurrent.shape
    keys = (conv.shape[1] - heads * size) // 2
    q, k, v = F.silu(conv).tensor_split([keys, 2 * keys], dim=-1)
    tokens = len(v)
    q, k = (each.view(tokens, -1, numbers) for each in (q, k))
    q, k = (
        each * torch.rsqrt(each.square().sum(-1, keepdim=True) + _LEAST_SQUARES) for each in (q, k)
    )
    raw = F.softplus(a.float() + weights.dt_bias).view(tokens, heads, -1)
    beta = weights.most_written * b.float().sigmoid()
    return q * numbers**-0.5, k, v.view(tokens, heads, size), weights.a[:, None] * raw, beta


def scan_inputs(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    weights: ScanWeights,
    states: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x, dt [T, C] and b, c [T, G * N] as x, dt and b, c [T, G, N], all float32."""
    numbers = states.shape[2]
    b, c = (each.float().view(len(x), -1, numbers) for each in (b, c))
    return x.float(), F.softplus(dt.float() + weights.dt_bias), b, c
