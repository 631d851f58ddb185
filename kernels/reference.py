"""Every op in plain torch: what it means, and what runs where no kernel is faster.

T tokens, H hidden size, D head size, N rows of logits, V vocabulary size. Few torch calls each, for
on a CPU a call costs as much as the arithmetic of a token. Each op of a model rounds to the
tensors' dtype where transformers' models do, so that in bf16 too the logits are the same bits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

_CANDIDATES = 1024
"""Tokens that sampling looks at first; where they do not hold all that a row keeps, it sorts the
rows whole.
"""
UNIT = 2.0**52
"""Probabilities are summed as whole multiples of 1 / UNIT: exactly in float64, and in any order."""
UNIFORM_DTYPE = np.float64
"""Of the numbers that `sample_filtered` draws by; a version that takes float32 says so under the
same name.
"""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32 up to the product
    (arXiv:1910.07467).
    """
    return F.rms_norm(x, weight.shape, None, eps) * weight


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual [T, H]: (rms_norm(x + residual), x + residual)."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x [T, 2 * I], the gate before the up projection: silu(gate) * up, [T, I]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotary_embedding(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [T, heads, D] by its position: dimension i is paired with i + D / 2 (Su et al.,
    arXiv:2104.09864).

    cos, signed_sin [T, 1, D]: both halves are alike but for the sign of the sine, negative in the
    first: half of x needs no negation when it is rolled to the place of its partner.
    """
    return x * cos + x.roll(x.shape[-1] // 2, -1) * signed_sin


def norm_rotary_embedding(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
) -> torch.Tensor:
    """q [T, heads, D] and k [T, kv heads, D], each head normalised and rotated: [T, heads + kv
    heads, D].
    """
    heads = torch.cat((rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)), dim=1)
    return rotary_embedding(heads, cos, signed_sin)


LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""Of the numbers that quantised activations may take; int8's -128 is left out, as by vLLM and
SGLang.
"""
_LEAST_SCALED = 1e-10
"""A row of zeros is divided by this instead of 0."""


def quantize_static(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x [T, K] / scale as `dtype`, one of `LARGEST`: rounded to the nearest, of two the even one;
    what is too large becomes the largest. scale [1] float32.
    """
    largest = LARGEST[dtype]
    numbers = (x.float() / scale).clamp(-largest, largest)
    return (numbers.round() if dtype == torch.int8 else numbers).to(dtype)


def quantize_dynamic(
    x: torch.Tensor, group: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] as `quantize_static`, each `group` columns of a row by a scale of their own, so that
    the largest of them becomes the largest number of `dtype`: (numbers [T, K], scales [T, K /
    group] float32). A group of K columns is a whole row (per token).
    """
    groups = _grouped(x, x.shape[-1] // group)
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=_LEAST_SCALED) / LARGEST[dtype]
    return quantize_static(groups, scale, dtype).flatten(-2), scale.squeeze(-1)


def _grouped(x: torch.Tensor, groups: int) -> torch.Tensor:
    """x [T, K] as float32 [T, groups, K / groups]."""
    return x.float().reshape(*x.shape[:-1], groups, x.shape[-1] // groups)


def scaled_linear(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """x [T, K] times weight [N, K], both quantised, plus bias [N]: [T, N], summed in float32 and
    rounded once to `dtype`.

    x_scale: [1], or [T, K / group]. weight_scale: [1], [N, 1], or one a block, [ceil(N / rows),
    ceil(K / columns)], both powers of two (`block_size`). All scales are float32.
    """
    wide = _grouped(x, x_scale.shape[-1]) * x_scale.unsqueeze(-1)
    result = F.linear(wide.flatten(-2), widened(weight, weight_scale))
    return (result if bias is None else result + bias.float()).to(dtype)


def block_size(size: int, blocks: int) -> int:
    """How many of `size` rows or columns have one of `blocks` scales; the last may have fewer."""
    return size if blocks == 1 else 1 << (-(-size // blocks) - 1).bit_length()


def widened(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """A weight [N, K] of `scaled_linear` as float32."""
    if scale.dim() == 2:
        for dim, size in enumerate(weight.shape):
            times = block_size(size, scale.shape[dim])
            scale = scale.repeat_interleave(times, dim).narrow(dim, 0, size)
    return weight.float() * scale


def weight_only_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    bias: torch.Tensor | None,
    bits: int,
) -> torch.Tensor:
    """x [T, K] times a weight of 4 or 8 `bits`, whose numbers are widened to x's dtype: [T, N].

    weight: [N, K * bits / 8] uint8, of 4 bits the earlier column in the low half of a byte. The
    weight's value is (number - zero) * scale, with scale [N, K / group] of 16 or 32 bits and zero
    [N, K / group] uint8.
    """
    if bits == 4:
        weight = torch.stack((weight & 15, weight >> 4), dim=-1).flatten(-2)
    groups = _grouped(weight, scale.shape[-1]) - zero.unsqueeze(-1).float()
    wide = (groups * scale.float().unsqueeze(-1)).flatten(-2).to(x.dtype)
    return F.linear(x, wide, bias)


_STEEPNESS = 1.702
"""Of GPT-OSS's gates."""


def gated(x: torch.Tensor, limit: float) -> torch.Tensor:
    """What experts make of gates and ups, x [P, 2 * I]: `silu_and_mul`, or, for a `limit` above 0,
    GPT-OSS's (up + 1) * gate * sigmoid(1.702 * gate), both clamped to it.
    """
    if limit == 0.0:
        return silu_and_mul(x)
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * _STEEPNESS))


def activated(x: torch.Tensor, size: int, limit: float) -> torch.Tensor:
    """`gated` of x [P, 2 * size]; of ups without gates, x [P, size], the squared ReLUs."""
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
    """x [T, H] through the experts topk_ids [T, k] int64, whose results are summed by topk_weights
    [T, k] float32; ids outside [0, E) add nothing. gate_up [E * 2I, H], of each expert the gates
    above the ups, down [E * H, I], biases [E * 2I] and [E * H]. `limit`: as `gated`. Experts
    without gates have gate_up [E * I, H], the ups alone, which become squared ReLUs.

    `weighs_input`: what an expert takes is weighted, and not what it gives (Llama 4). No shape and
    no wait depends on what is chosen.
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
    """`fused_moe`, whose products are `expert_linear(rows, weight, ends)`: of rows [P, K] those up
    to each of `ends` [E] int32 by that weight of [E, N, K], to [P, N]; what comes behind the last
    end does not matter.
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
    # Behind the last end is memory as it was.
    results = results.masked_fill((chosen == experts)[:, None], 0.0)
    summed = torch.empty_like(results).index_copy_(0, order, results)
    return summed.view(tokens, each, hidden).sum(1).to(x.dtype)


def _expert_linear(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    # It takes rows of whole 16 bytes.
    if missing := -x.shape[1] % (16 // x.element_size()):
        x, weight = F.pad(x, (0, missing)), F.pad(weight, (0, missing))
    return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)


def rms_norm_quantize_static(
    x: torch.Tensor, weight: torch.Tensor, eps: float, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """`rms_norm`, then `quantize_static`; like each of the following, it rounds to x's dtype
    between the two.
    """
    return quantize_static(rms_norm(x, weight, eps), scale, dtype)


def rms_norm_quantize_dynamic(
    x: torch.Tensor, weight: torch.Tensor, eps: float, group: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm`, then `quantize_dynamic`."""
    return quantize_dynamic(rms_norm(x, weight, eps), group, dtype)


def add_rms_norm_quantize_static(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scale: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add_rms_norm`, its first result quantised: (numbers, x + residual)."""
    normalised, total = add_rms_norm(x, residual, weight, eps)
    return quantize_static(normalised, scale, dtype), total


def add_rms_norm_quantize_dynamic(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    group: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`add_rms_norm`, its first result quantised: (numbers, scales, x + residual)."""
    normalised, total = add_rms_norm(x, residual, weight, eps)
    return *quantize_dynamic(normalised, group, dtype), total


def silu_and_mul_quantize_static(
    x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """`silu_and_mul`, then `quantize_static`."""
    return quantize_static(silu_and_mul(x), scale, dtype)


def silu_and_mul_quantize_dynamic(
    x: torch.Tensor, group: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """`silu_and_mul`, then `quantize_dynamic`."""
    return quantize_dynamic(silu_and_mul(x), group, dtype)


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Ids [N] int64 of the largest of each row of logits [N, V] float32; of equals the lowest."""
    return logits.argmax(dim=-1)


def mask_logits(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    """Write -inf over logits [N, V] float32 in `rows` [n] int64, where the token's bit is 0 in bits
    [n, ceil(V / 32)] int32, the lowest first.
    """
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    allowed = ((bits.unsqueeze(-1) >> shifts) & 1).flatten(1)[:, : logits.shape[1]]
    masked = logits.index_select(0, rows).masked_fill_(allowed == 0, float("-inf"))
    logits.index_copy_(0, rows, masked)


def sample_filtered(
    probs: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    """Token ids [N] int64, drawn from what top-k, top-p (of what top-k leaves) and min-p all keep
    of probs [N, V] float32.

    top_k [N] int64, V where it is off; top_p, min_p [N] float32; uniform [N] float64 in [0, 1).
    Each keeps at least the likeliest token. Tokens stand in the order of their probability, of
    equals the lower id first; drawn is the first whose running sum exceeds uniform times the sum of
    all that are kept. Sums are exact (`UNIT`), so whoever computes them draws the same token.
    """
    vocab = probs.shape[1]
    width = min(vocab, _CANDIDATES)
    if width < vocab:
        tokens, complete = _draw(*_likeliest(probs, width), vocab, top_k, top_p, min_p, uniform)
        if bool(complete.all()):
            return tokens
    values, ids = probs.sort(dim=-1, descending=True, stable=True)
    return _draw(values, ids, vocab, top_k, top_p, min_p, uniform)[0]


def _likeliest(probs: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `width` largest of each row and their ids, as a stable sort orders them: `topk` orders
    equals as it likes.
    """
    ids = probs.topk(width, dim=-1).indices.sort(dim=-1).values
    values, order = probs.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _draw(
    values: torch.Tensor,
    ids: torch.Tensor,
    vocab: int,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [N] from the candidates `values`, `ids` [N, n] in their order, and whether a row keeps
    nothing beside them [N].
    """
    top_k, width = top_k[:, None], values.shape[1]
    weights = (values * UNIT).long()
    sums = weights.cumsum(-1)
    among_k = torch.arange(width, device=values.device) < top_k
    mass = torch.where(top_k < vocab, (weights * among_k).sum(-1, keepdim=True), int(UNIT))
    among_p = (sums - weights < (top_p.double()[:, None] * mass).clamp_(min=1.0)) | (
        top_p[:, None] >= 1.0
    )
    keep = among_k & among_p & (values >= min_p[:, None] * values[:, :1])
    kept = (weights * keep).sum(-1, keepdim=True)
    target = torch.minimum((uniform[:, None] * kept).long(), kept - 1)
    place = torch.searchsorted(sums, target, right=True).clamp_(max=width - 1)
    # Equals of the last candidate may stand beyond it, with lower ids. Of NaN nothing is kept.
    last = values.gather(1, (keep.sum(-1, keepdim=True) - 1).clamp_(min=0))
    complete = ((last > values[:, -1:]) & ((top_k <= width) | (top_k >= vocab))) | (
        weights[:, -1:] == 0
    )
    return ids.gather(1, place)[:, 0], complete[:, 0]
