"""Layers of experts in plain torch: the definition of their ops (see `kernels.reference`).

Shapes: T tokens, E experts, k experts of a token, P = T * k pairs of a token and its expert, H
hidden size, I intermediate size of an expert.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

GELU = -1.0  # The `limit` of experts whose gates pass a GELU.
_STEEPNESS = 1.702  # Constant of GPT-OSS's gates.


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
    """Return the experts [T, k] int64 that a router's logits [T, E] choose, and their weights
    [T, k] float32.

    Scores are a softmax, or if `sigmoid` the sigmoid of each logit, in float32. `correction` [E]
    float32 is added while experts are chosen. If `groups` is above 1, only experts of the
    `top_groups` best groups are candidates; a group is rated by the sum of its `group_best` best.
    If `renormalized`, weights are divided by their sum plus `least_sum`. Then they are multiplied
    by `scale`.
    """
    logits = logits.float()
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
    choice = scores if correction is None else scores + correction
    if groups > 1:
        grouped = choice.view(-1, groups, choice.shape[1] // groups)
        best = grouped.topk(group_best, dim=-1).values.sum(-1)
        best = best.topk(top_groups, dim=-1).indices
        is_left = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, True)
        choice = grouped.masked_fill(~is_left.unsqueeze(-1), float("-inf")).flatten(-2)
    ids = choice.topk(top_k, dim=-1).indices
    weights = scores.gather(-1, ids)
    if renormalized:
        weights = weights / (weights.sum(-1, keepdim=True) + least_sum)
    return ids, weights if scale == 1.0 else weights * scale


def gated(x: torch.Tensor, limit: float) -> torch.Tensor:
    """Apply an expert's activation to gates and ups, x [P, 2 * I].

    This is `silu_and_mul`, or, if `limit` is above 0, GPT-OSS's (up + 1) * gate * sigmoid(1.702 *
    gate) with both clamped to `limit`. `GELU` stands for gelu(gate) * up by tanh.
    """
    gate, up = x.chunk(2, dim=-1)
    if limit < 0.0:
        return F.gelu(gate, approximate="tanh") * up
    if limit == 0.0:
        return F.silu(gate) * up
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * _STEEPNESS))


def activated(x: torch.Tensor, size: int, limit: float) -> torch.Tensor:
    """Return `gated` of x [P, 2 * size], or the squared ReLU of ups without gates, x [P, size]."""
    return F.relu(x).square() if x.shape[1] == size else gated(x, limit)


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
    """Send x [T, H] through the experts topk_ids [T, k] int64, and sum the results weighted by
    topk_weights [T, k] float32. Ids outside [0, E) add nothing.

    gate_up is [E * 2I, H], for each expert the gates before the ups. down is [E * H, I]. Biases are
    [E * 2I] and [E * H]. `limit`: see `gated`. Experts without gates have gate_up [E * I, H] and a
    squared ReLU.

    If `weighs_input`, the input of an expert is weighted instead of its result (Llama 4). No shape
    and no wait depends on the choice of experts.
    """
    return moe_by(
        _expert_linear,
        x,
        topk_ids,
        topk_weights,
        gate_up,
        gate_up_bias,
        down,
        down_bias,
        limit,
        weighs_input,
    )


def moe_by(
    expert_linear: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
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
    """Compute `fused_moe` with products by `expert_linear(rows, weight, ends)`.

    It multiplies rows [P, K] up to each of `ends` [E] int32 by that expert's weight of [E, N, K],
    and returns [P, N]. Rows after the last end may hold anything.
    """
    (tokens, each), (hidden, size) = topk_ids.shape, (x.shape[1], down.shape[1])
    experts = down.shape[0] // hidden
    flat = topk_ids.flatten()
    chosen, order = torch.where((flat >= 0) & (flat < experts), flat, experts).sort(stable=True)
    ends = torch.searchsorted(
        chosen, torch.arange(experts, device=x.device), right=True, out_int32=True
    )
    weights, among = topk_weights.flatten()[order, None], chosen.clamp(max=experts - 1)
    rows = x[order // each]
    if weighs_input:
        rows = (rows * weights).to(x.dtype)
    between = expert_linear(rows, gate_up.view(experts, -1, hidden), ends)
    if gate_up_bias is not None:
        between = between + gate_up_bias.view(experts, -1)[among]
    between = activated(between, size, limit)
    results = expert_linear(between, down.view(experts, hidden, size), ends)
    if down_bias is not None:
        results = results + down_bias.view(experts, -1)[among]
    if not weighs_input:
        results = results * weights
    # Rows after the last end are uninitialised memory.
    results = results.masked_fill((chosen == experts)[:, None], 0.0)
    summed = torch.empty_like(results).index_copy_(0, order, results)
    return summed.view(tokens, each, hidden).sum(1).to(x.dtype)


def _expert_linear(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    # `grouped_mm` needs rows of a multiple of 16 bytes.
    if missing := -x.shape[1] % (16 // x.element_size()):
        x, weight = F.pad(x, (0, missing)), F.pad(weight, (0, missing))
    return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
