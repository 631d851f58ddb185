"""Every op in plain torch: the definition of the ops, and the version used if no kernel is faster.

T tokens, H hidden size, D head size, N rows of logits, V vocabulary size. Ops make few torch calls,
because on a CPU a call costs as much as the arithmetic of a token. They round as transformers does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from .experts import GELU as GELU
from .experts import activated as activated
from .experts import choose_experts as choose_experts
from .experts import fused_moe as fused_moe
from .experts import moe_by as moe_by
from .fp4 import fp4_linear as fp4_linear
from .fp4 import quantize_fp4 as quantize_fp4
from .lora import lora as lora

# Tokens that sampling looks at first. If a row may keep more, the rows are sorted whole.
_CANDIDATES = 1024
UNIT = 2.0**52  # Probabilities are summed as multiples of 1 / UNIT, so sums are exact in any order.
# dtype of the random numbers of `sample_filtered`. A version that takes float32 sets it so.
UNIFORM_DTYPE = np.float64


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32 up to the
    product (arXiv:1910.07467).
    """
    return F.rms_norm(x, weight.shape, None, eps) * weight


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rms_norm(x + residual), x + residual) of x, residual [T, H]."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, [T, I], of x [T, 2 * I], which holds gate before up."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotary_embedding(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [T, heads, D] by its position. Dimension i is paired with i + D / 2 (Su et al.,
    arXiv:2104.09864).

    cos and signed_sin are [T, 1, D] with equal halves, but the first half of the sine is negated.
    So x only needs to be rolled to the place of its partner, not negated.
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
    """Normalise and rotate each head of q [T, heads, D] and k [T, kv heads, D]. Return both as [T,
    heads + kv heads, D].
    """
    heads = torch.cat((rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)), dim=1)
    return rotary_embedding(heads, cos, signed_sin)


# Largest numbers of quantised activations. int8's -128 is not used, as in vLLM and SGLang.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
_LEAST_SCALED = 1e-10  # A row of zeros is divided by this instead of 0.


def quantize_static(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return x [T, K] / scale as `dtype`, one of `LARGEST`. scale is [1] float32.

    Numbers are rounded to the nearest, ties to even. Numbers out of range become the largest.
    """
    largest = LARGEST[dtype]
    numbers = (x.float() / scale).clamp(-largest, largest)
    return (numbers.round() if dtype == torch.int8 else numbers).to(dtype)


def quantize_dynamic(
    x: torch.Tensor, group: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise x [T, K] with one scale for each `group` columns of a row, so that the largest
    number of a group becomes the largest of `dtype`.

    Return numbers [T, K] and scales [T, K / group] float32. With group K, each token has a scale.
    """
    groups = _grouped(x, x.shape[-1] // group)
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=_LEAST_SCALED) / LARGEST[dtype]
    return quantize_static(groups, scale, dtype).flatten(-2), scale.squeeze(-1)


def _grouped(x: torch.Tensor, groups: int) -> torch.Tensor:
    """Return x [T, K] as float32 [T, groups, K / groups]."""
    return x.float().reshape(*x.shape[:-1], groups, x.shape[-1] // groups)


def scaled_linear(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Multiply x [T, K] by weight [N, K], both quantised, and add bias [N]. Return [T, N], summed
    in float32 and rounded once to `dtype`.

    x_scale is [1] or [T, K / group]. weight_scale is [1], [N, 1], or one per block, [ceil(N /
    rows), ceil(K / columns)], where rows and columns are powers of two (`block_size`). All scales
    are float32.
    """
    wide = _grouped(x, x_scale.shape[-1]) * x_scale.unsqueeze(-1)
    result = F.linear(wide.flatten(-2), widened(weight, weight_scale))
    return (result if bias is None else result + bias.float()).to(dtype)


def block_size(size: int, blocks: int) -> int:
    """Return the rows or columns per block if `size` of them have `blocks` scales."""
    return size if blocks == 1 else 1 << (-(-size // blocks) - 1).bit_length()


def widened(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return a weight [N, K] of `scaled_linear` as float32."""
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
    """Multiply x [T, K] by a weight of 4 or 8 `bits` whose numbers are widened to x's dtype: [T,
    N].

    weight is [N, K * bits / 8] uint8; with 4 bits the earlier column is in the low half of a byte.
    The value of a weight is (number - zero) * scale, with scale [N, K / group] of 16 or 32 bits and
    zero [N, K / group] uint8.
    """
    if bits == 4:
        weight = torch.stack((weight & 15, weight >> 4), dim=-1).flatten(-2)
    groups = _grouped(weight, scale.shape[-1]) - zero.unsqueeze(-1).float()
    wide = (groups * scale.float().unsqueeze(-1)).flatten(-2).to(x.dtype)
    return F.linear(x, wide, bias)


def rms_norm_quantize_static(
    x: torch.Tensor, weight: torch.Tensor, eps: float, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return `rms_norm`, then `quantize_static`. This op and the following ones round to x's dtype
    between the two.
    """
    return quantize_static(rms_norm(x, weight, eps), scale, dtype)


def rms_norm_quantize_dynamic(
    x: torch.Tensor, weight: torch.Tensor, eps: float, group: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `rms_norm`, then `quantize_dynamic`."""
    return quantize_dynamic(rms_norm(x, weight, eps), group, dtype)


def add_rms_norm_quantize_static(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scale: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `add_rms_norm` with its first result quantised: (numbers, x + residual)."""
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
    """Return `add_rms_norm` with its first result quantised: (numbers, scales, x + residual)."""
    normalised, total = add_rms_norm(x, residual, weight, eps)
    return *quantize_dynamic(normalised, group, dtype), total


def silu_and_mul_quantize_static(
    x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return `silu_and_mul`, then `quantize_static`."""
    return quantize_static(silu_and_mul(x), scale, dtype)


def silu_and_mul_quantize_dynamic(
    x: torch.Tensor, group: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `silu_and_mul`, then `quantize_dynamic`."""
    return quantize_dynamic(silu_and_mul(x), group, dtype)


def fp4_layer(x: torch.Tensor, factor: torch.Tensor, *others: Any) -> torch.Tensor:
    """Return `fp4_linear` of `quantize_fp4`: what a trial of a library compares."""
    return fp4_linear(*quantize_fp4(x, factor), *others)


def fp4_gated_layer(x: torch.Tensor, factor: torch.Tensor, *others: Any) -> torch.Tensor:
    """Return `fp4_linear` of `silu_and_mul_quantize_fp4`, for the same purpose."""
    return fp4_linear(*silu_and_mul_quantize_fp4(x, factor), *others)


def rms_norm_quantize_fp4(
    x: torch.Tensor, weight: torch.Tensor, eps: float, factor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `rms_norm`, then `quantize_fp4`."""
    return quantize_fp4(rms_norm(x, weight, eps), factor)


def add_rms_norm_quantize_fp4(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    factor: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `add_rms_norm` with its first result quantised: (numbers, scales, x + residual)."""
    normalised, total = add_rms_norm(x, residual, weight, eps)
    return *quantize_fp4(normalised, factor), total


def silu_and_mul_quantize_fp4(
    x: torch.Tensor, factor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `silu_and_mul`, then `quantize_fp4`."""
    return quantize_fp4(silu_and_mul(x), factor)


def attend_all(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Return attention [B, H, D] of queries q [B, H, D] to all keys k [L, H, D] and values v."""
    q, k, v = (each.transpose(0, 1)[None] for each in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, scale=scale)[0].transpose(0, 1)


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Return the ids [N] int64 of the largest of logits [N, V] float32, the lowest of equals."""
    return logits.argmax(dim=-1)


def mask_logits(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    """Write -inf into `rows` [n] int64 of logits [N, V] float32 where a token's bit is 0 in bits
    [n, ceil(V / 32)] int32, lowest bit first.
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
    """Draw token ids [N] int64 from the tokens of probs [N, V] float32 that top-k, top-p (of what
    top-k keeps) and min-p all keep.

    top_k is [N] int64, V if off; top_p and min_p are [N] float32; uniform [N] float64 in [0, 1).
    Each filter keeps at least the likeliest token. Tokens are ordered by probability, equal ones by
    id. The result is the first token whose running sum exceeds uniform times the sum of all kept
    tokens. Sums are exact (`UNIT`), so every implementation draws the same token.
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
    """Return the `width` largest numbers of each row and their ids, in the order of a stable sort.
    `topk` orders equal numbers arbitrarily.
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
    """Draw tokens [N] from the ordered candidates `values`, `ids` [N, n]. Also return whether the
    candidates hold all that a row keeps [N].
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
    # Tokens as likely as the last candidate may be missing. A row of NaN keeps nothing.
    last = values.gather(1, (keep.sum(-1, keepdim=True) - 1).clamp_(min=0))
    complete = ((last > values[:, -1:]) & ((top_k <= width) | (top_k >= vocab))) | (
        weights[:, -1:] == 0
    )
    return ids.gather(1, place)[:, 0], complete[:, 0]
