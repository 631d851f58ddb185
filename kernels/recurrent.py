"""Layers with a recurrent state. Decodes and prompts of a step are each computed by an op of `ops`.

Shapes: T tokens of the step, H heads of P numbers, N numbers of a state for each of these, G groups
of heads, K columns of a convolution over C channels. Rows that are not part of the `StatePlan` are
padding and become zeros.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from . import ops
from .recurrent_steps import DeltaWeights, Mamba2Weights, ScanWeights, States
from .state_plan import StatePlan


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    states: torch.Tensor,
    plan: StatePlan,
) -> None:
    """Write the causal convolution of x [T, C] over the last K tokens of each channel into out [T,
    C].

    weight [C, K] and bias [C] are float32. states [slots, K - 1, C] holds the tokens before, in the
    dtype of x.
    """

    _decodes(plan, (x,), out, lambda x: ops.conv_step(x, weight, bias, states, plan.slots))
    if plan.prompts is not None:
        ops.conv_prompts(x, weight, bias, out, states, plan.prompts)


def mamba2(
    x: torch.Tensor,
    dt: torch.Tensor,
    weights: Mamba2Weights,
    out: torch.Tensor,
    states: States,
    plan: StatePlan,
) -> None:
    """Compute Mamba 2 (arXiv:2405.21060) without its projections.

    x [T, C] holds x, b and c of heads and groups (C = H * P + 2 * G * N). dt is [T, H]. The result
    is written into out [T, H * P]. After a convolution and silu, for each head and token

        dt = softplus(dt + dt_bias)
        state = exp(dt * a) * state + dt * x b^T        y = state c + d * x

    states: [slots, K - 1, C] of the convolution and [slots, H, P, N].
    """

    _decodes(plan, (x, dt), out, lambda x, dt: ops.mamba2_step(x, dt, weights, states, plan.slots))
    if plan.prompts is not None:
        ops.mamba2_prompts(x, dt, weights, out, states, plan.prompts)


def lightning_attention(
    x: torch.Tensor,
    log_decay: torch.Tensor,
    out: torch.Tensor,
    states: torch.Tensor,
    plan: StatePlan,
) -> None:
    """Compute Lightning attention (arXiv:2401.04658) without its projections.

    x [T, 3 * H * P] holds values, keys and queries. The result is written into out [T, H * P].
    After silu, for each head and token

        state = exp(log_decay) * state + v k^T        y = state q

    This is Mamba 2 with steps of length 1 and a convolution of one column, which keeps no tokens.
    states is [slots, H, P, P].
    """

    channels, zeros = x.shape[1], torch.zeros_like(log_decay)
    one = torch.ones(channels, 1, dtype=torch.float32, device=x.device)
    weights = Mamba2Weights(one, None, log_decay, zeros, zeros, (1.0, 1.0))
    held = States(x.new_empty(len(states), 0, channels), states)
    mamba2(x, x.new_zeros(len(x), len(log_decay)), weights, out, held, plan)


def gated_delta_net(
    x: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    weights: DeltaWeights,
    out: torch.Tensor,
    states: States,
    plan: StatePlan,
) -> None:
    """Compute the gated delta rule (arXiv:2412.06464) without its projections.

    x [T, C] holds queries, keys and values (C = 2 * G * N + H * P). b is [T, H], a [T, H * D]. The
    result is written into out [T, H * P]. After a convolution and silu, for each head and token,
    with k and q of length 1 and q / sqrt(N)

        state = exp(weights.a * softplus(a + dt_bias)) * state
        state += k (most_written * sigmoid(b) * (v - state^T k))^T     y = state^T q

    D is 1, or N if each row of a state has its own decay (Kimi Delta Attention, arXiv:2510.26692).
    states: [slots, K - 1, C] of the convolution and [slots, H, N, P].
    """

    _decodes(
        plan,
        (x, b, a),
        out,
        lambda x, b, a: ops.gated_delta_step(x, b, a, weights, states, plan.slots),
    )
    if plan.prompts is not None:
        ops.gated_delta_prompts(x, b, a, weights, out, states, plan.prompts)


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    weights: ScanWeights,
    out: torch.Tensor,
    states: torch.Tensor,
    plan: StatePlan,
) -> None:
    """Compute the selective scan of Mamba (arXiv:2312.00752).

    x and dt are [T, C]; b and c are [T, G * N] and shared by the channels of a group. The result is
    written into out [T, C]. For each channel and token

        dt = softplus(dt + dt_bias)
        state = exp(dt * a) * state + dt * x * b        y = c state + d * x

    states: [slots, C, N] float32.
    """

    _decodes(
        plan,
        (x, dt, b, c),
        out,
        lambda x, dt, b, c: ops.selective_scan_step(x, dt, b, c, weights, states, plan.slots),
    )
    if plan.prompts is not None:
        ops.selective_scan_prompts(x, dt, b, c, weights, out, states, plan.prompts)


def _decodes(
    plan: StatePlan,
    inputs: tuple[torch.Tensor, ...],
    out: torch.Tensor,
    step: Callable[..., torch.Tensor],
) -> None:
    """Apply `step` to the rows of decodes and write the result into `out`. Rows of padding become
    zeros.
    """
    out[plan.num_tokens :] = 0.0
    if plan.rows is None:
        out[: plan.num_tokens] = step(*(each[: plan.num_tokens] for each in inputs))
    elif len(plan.rows):
        result = step(*(each.index_select(0, plan.rows) for each in inputs))
        out.index_copy_(0, plan.rows, result.to(out.dtype))
