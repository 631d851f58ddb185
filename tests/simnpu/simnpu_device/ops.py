"""The meaning of the npu and atb ops that a server of language models calls, in plain torch on the
device's bytes.

Shapes: T tokens, B requests, N query heads, K key/value heads, D head size, P pages, S tokens in a
page. Sources: the op documentation in torch_npu 2.13's `_op_plugin_docs.py`, and for the T ==
actual_seq_lengths[-1] rule the behaviour that vllm-ascend pads for. float32 attention is allowed
here, which hardware rejects: tests compare tightly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from . import collectives, quantized_ops
from .checks import check
from .extension import extension

Tensor = torch.Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
HOST_ARGUMENTS = {"atb::_npu_paged_attention.context_lens"}
"""Tensors that the host part of a launch reads."""


def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """(normalised input, reciprocal root of the mean square [..., 1] float32)."""
    name = "npu_rms_norm"
    check(input.dtype in FLOATS, f"{name}: input must be floating point, got {input.dtype}")
    check(
        gamma.dtype in (input.dtype, torch.float32) and gamma.numel() > 0,
        f"{name}: gamma must be {input.dtype} as input is, or float32; got {gamma.dtype}",
    )
    check(
        gamma.shape == input.shape[input.dim() - gamma.dim() :],
        f"{name}: gamma must have the shape of input's last dimensions",
    )
    wide = input.float()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * rstd * gamma.float()).to(input.dtype).contiguous(), rstd


def npu_add_rms_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """(normalised x1 + x2, reciprocal root of the mean square, x1 + x2)."""
    name = "npu_add_rms_norm"
    check(
        x1.dtype == x2.dtype == gamma.dtype,
        f"{name}: x1, x2 and gamma must be of one dtype, got {x1.dtype}, {x2.dtype}, {gamma.dtype}",
    )
    check(x1.shape == x2.shape and x1.numel() > 0, f"{name}: x1 and x2 must be alike, not empty")
    total = (x1 + x2).contiguous()
    return (*npu_rms_norm(total, gamma, epsilon), total)


def npu_grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    group_list: Tensor,
    split_item: int = 0,
    group_type: int | None = None,
    group_list_type: int = 0,
) -> list[Tensor]:
    """Rows of x [M, K] up to each of group_list [E] by that weight of [E, K, N]."""
    name = "npu_grouped_matmul"
    check(
        len(x) == len(weight) == 1 and (split_item, group_type, group_list_type) == (3, 0, 0),
        f"{name}: the simulator knows one x and one weight, whose rows are grouped by their ends",
    )
    (rows,), (weights,) = x, weight
    check(
        rows.dtype == weights.dtype and rows.dtype in (torch.float16, torch.bfloat16),
        f"{name}: x and weight must be of one dtype of 16 bits",
    )
    check(group_list.dtype == torch.int64, f"{name}: group_list must be int64")
    check(rows.shape[1] == weights.shape[1], f"{name}: x and weight do not fit")
    out = rows.new_full((len(rows), weights.shape[2]), float("nan"))
    begin = 0
    for expert, end in enumerate([] if rows.is_meta else group_list.tolist()):
        out[begin:end] = rows[begin:end] @ weights[expert]
        begin = end
    return [out]


def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
    name = "npu_swiglu"
    check(input.dtype in FLOATS, f"{name}: input must be floating point, got {input.dtype}")
    check(input.is_contiguous() and input.numel() > 0, f"{name}: input must be contiguous")
    check(input.shape[dim] % 2 == 0, f"{name}: dimension {dim} must be even")
    gate, up = input.float().chunk(2, dim)
    return (torch.nn.functional.silu(gate) * up).to(input.dtype)


def npu_rotary_mul(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    """input * r1 + rotated(input) * r2; `r1` the cosines, `r2` the sines, all of four dimensions:
    batch, tokens, heads and their numbers, of which r1 and r2 have one batch and one head.
    """
    name = "npu_rotary_mul"
    check(
        input.dim() == r1.dim() == r2.dim() == 4,
        f"{name}: input, r1 and r2 must have 4 dimensions",
    )
    batch, tokens, heads, size = input.shape
    check(input.dtype in FLOATS, f"{name}: input must be floating point, got {input.dtype}")
    check(
        size % 2 == 0 and size < 896 and batch < 1000 and heads < 1000,
        f"{name}: heads must be even and below 896 numbers, below 1000 heads and sequences; got "
        f"{list(input.shape)}",
    )
    check(
        r1.shape == r2.shape and list(r1.shape) in ([1, tokens, 1, size], list(input.shape)),
        f"{name}: r1 and r2 must be [1, {tokens}, 1, {size}], got {list(r1.shape)}",
    )
    input, r1, r2, dtype = input.float(), r1.float(), r2.float(), input.dtype
    if rotate is not None:
        rotated = input @ rotate.float()
    elif rotary_mode == "half":
        first, second = input.chunk(2, -1)
        rotated = torch.cat((-second, first), -1)
    else:
        check(rotary_mode == "interleave", f"{name}: no rotary_mode {rotary_mode!r}")
        rotated = torch.stack((-input[..., 1::2], input[..., ::2]), -1).flatten(-2)
    return (input * r1 + rotated * r2).to(dtype).contiguous()


def npu_reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_indices: Tensor
) -> None:
    """Stores key and value [T, K, D] at slots [T] (page * S + offset) of the caches [P, S, K,
    D].
    """
    check(
        slot_indices.dtype == torch.int32,
        f"_npu_reshape_and_cache: slot_indices must be int32, got {slot_indices.dtype}",
    )
    check(
        len(slot_indices) == len(key) == len(value),
        "_npu_reshape_and_cache: one slot for each token",
    )
    slots = slot_indices.long()
    check(
        bool(((slots >= 0) & (slots < key_cache.shape[0] * key_cache.shape[1])).all()),
        "_npu_reshape_and_cache: no such slot",
    )
    key_cache.flatten(0, 1)[slots] = key
    value_cache.flatten(0, 1)[slots] = value


def npu_paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: Tensor,
    context_lens: Tensor,
    out: Tensor,
    *,
    workspace: Tensor | None = None,
) -> None:
    """Decoding: one query [B, N, D] a request over its `context_lens` [B] (on the host) tokens in
    caches [P, S, K, D].
    """
    check(context_lens.dtype == torch.int32, "_npu_paged_attention: context_lens must be int32")
    check(block_table.dtype == torch.int32, "_npu_paged_attention: block_table must be int32")
    check(
        query.shape[1] == num_heads and key_cache.shape[2] == num_kv_heads,
        "_npu_paged_attention: wrong number of heads",
    )
    for request, length in enumerate(context_lens.tolist()):
        key, value = (
            _read_pages(cache, block_table[request], length) for cache in (key_cache, value_cache)
        )
        out[request] = _attention(
            query[request : request + 1], key, value, scale_value, causal=False
        )[0][0]


def npu_fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: list[int] | None = None,
    actual_seq_lengths_kv: list[int] | None = None,
    block_table: Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    block_size: int = 0,
    softmax_lse_flag: bool = False,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Attention of query [T, N, D] over paged caches [P, S, K * D] or [P, K, S, D]: (output [T, N,
    D], log-sum-exp). With `query_rope` and `key_rope`: `_latent`.

    `actual_seq_lengths` are running totals of the requests' new tokens, `actual_seq_lengths_kv`
    each request's own length. `sparse_mode` 3 is causal with the last query on the last key and
    needs the 2048 x 2048 mask; 0 without mask is full.
    """
    if query_rope is not None or key_rope is not None:
        check(atten_mask is None and sparse_mode == 0, "rope parts: the simulator knows decodes")
        check(value.shape == key.shape, "rope parts: values are the keys' numbers")
        check(input_layout == "BNSD" and num_key_value_heads == 1, "rope parts: BNSD, one key")
        check(query.shape[1] == num_heads, "rope parts: query must be [B, num_heads, 1, D]")
        return _latent(
            (query, query_rope), (key, key_rope), actual_seq_lengths_kv, block_table, block_size,
            scale,
        )  # fmt: skip
    heads_kv = num_key_value_heads or num_heads
    caches = [_pages_of_tokens(cache, heads_kv, block_size) for cache in (key, value)]
    ends, lengths, pages = _check_paged_tnd(
        query, actual_seq_lengths, actual_seq_lengths_kv, block_table, input_layout, num_heads
    )
    _check_block_size(block_size, prefill=len(query) > len(ends))
    _check_head_size(query.shape[2])
    _check_mask(sparse_mode, atten_mask)
    out = torch.empty_like(query)
    lse = torch.zeros(len(query), num_heads, 1) if softmax_lse_flag else torch.zeros(1)
    begin = 0
    for request, (end, length) in enumerate(zip(ends, lengths, strict=True)):
        keys, values = (_read_pages(cache, pages[request], length) for cache in caches)
        out[begin:end], sums = _attention(
            query[begin:end], keys, values, scale, causal=sparse_mode == 3
        )
        if softmax_lse_flag:
            lse[begin:end, :, 0] = sums
        begin = end
    return out, lse


def _latent(
    query: tuple[Tensor, Tensor | None],
    key: tuple[Tensor, Tensor | None],
    lengths: list[int] | None,
    pages: Tensor | None,
    block_size: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """One query [B, N, 1, R] and [B, N, 1, Q] a request over caches [P, 1, S, R] and [P, 1, S, Q],
    which hold the values too: [B, N, 1, R]. Toys' sizes up to 32 are allowed here, and their heads.
    """
    name = "npu_fused_infer_attention_score"
    (q, q_rope), (keys, keys_rope) = query, key
    check(q_rope is not None and keys_rope is not None, f"{name}: both rope parts or neither")
    assert q_rope is not None and keys_rope is not None
    parts = (q, q_rope, keys, keys_rope)
    check(all(each.is_contiguous() and each.dim() == 4 for each in parts), f"{name}: contiguous")
    check(len({each.dtype for each in parts}) == 1, f"{name}: rope parts of another dtype")
    (requests, heads, new, latent), turned = q.shape, q_rope.shape[3]
    check(new == 1, f"{name}: without a mask a query has one token, got {new}")
    check(
        (heads in (32, 64, 128) and (latent, turned) == (512, 64)) or latent <= 32,
        f"{name}: N must be 32, 64 or 128, D 512 and that of the rope 64; got {list(q.shape)}",
    )
    check(block_size in (16, 128), f"{name}: block_size must be 16 or 128 with rope parts")
    for part, size in ((keys, latent), (keys_rope, turned)):
        check(list(part.shape[1:]) == [1, block_size, size], f"{name}: cache {list(part.shape)}")
    check(
        pages is not None and pages.dtype == torch.int32 and bool(lengths),
        f"{name}: rope parts need pages, int32, and actual_seq_lengths_kv",
    )
    assert pages is not None and lengths
    check(len(pages) == len(lengths) == requests, f"{name}: a length and pages for each request")
    whole = torch.cat((keys, keys_rope), dim=-1).transpose(1, 2)
    out = torch.empty_like(q)
    for request, length in enumerate(lengths):
        read = _read_pages(whole, pages[request], length)
        one = torch.cat((q[request], q_rope[request]), dim=-1).transpose(0, 1)
        attended, _ = _attention(one, read, read[..., :latent], scale, causal=False)
        out[request] = attended.transpose(0, 1)
    return out, torch.zeros(1)


def _check_paged_tnd(
    query: Tensor,
    ends: list[int] | None,
    lengths: list[int] | None,
    pages: Tensor | None,
    layout: str,
    num_heads: int,
) -> tuple[list[int], list[int], Tensor]:
    name = "npu_fused_infer_attention_score"
    check(
        layout == "TND" and pages is not None,
        f"{name}: the simulator knows layout TND with a block_table only",
    )
    check(
        bool(ends) and bool(lengths),
        f"{name}: TND needs actual_seq_lengths and actual_seq_lengths_kv",
    )
    assert pages is not None and ends and lengths
    check(
        pages.dtype == torch.int32 and pages.dim() == 2,
        f"{name}: block_table must be int32 [B, pages]",
    )
    check(
        len(ends) == len(lengths) == len(pages),
        f"{name}: one length and one row of block_table for each request",
    )
    check(
        query.dim() == 3 and query.shape[1] == num_heads, f"{name}: query must be [T, num_heads, D]"
    )
    check(
        ends == sorted(ends) and ends[-1] == len(query),
        f"{name}: actual_seq_lengths must rise to T = {len(query)}, got {ends}",
    )
    return ends, lengths, pages


def _check_block_size(block_size: int, *, prefill: bool) -> None:
    unit = 128 if prefill else 16
    check(
        0 < block_size <= 512 and block_size % unit == 0,
        f"npu_fused_infer_attention_score: block_size must be a multiple of {unit} up to 512, got "
        f"{block_size}",
    )


def _check_head_size(size: int) -> None:
    """Those of toys, up to 32, are allowed here, which hardware rejects."""
    check(
        size in (64, 128, 192) or size <= 32,
        f"When layout is TND, queryD({size}), keyD({size}) and valueD({size}) must be same equal "
        "192/128/64",
    )


def _check_mask(sparse_mode: int, mask: Tensor | None) -> None:
    name = "npu_fused_infer_attention_score"
    check(sparse_mode in (0, 3), f"{name}: the simulator knows sparse_mode 0 and 3 only")
    if sparse_mode == 0:
        check(mask is None, f"{name}: the simulator knows sparse_mode 0 without atten_mask only")
        return
    check(
        mask is not None and mask.shape[-2:] == (2048, 2048),
        f"{name}: sparse_mode 3 needs an atten_mask of 2048 x 2048",
    )
    assert mask is not None
    check(
        mask.dtype in (torch.bool, torch.int8, torch.uint8),
        f"{name}: atten_mask must be bool, int8 or uint8",
    )
    check(
        extension().is_trial() or torch.equal(mask.reshape(2048, 2048).bool(), _causal_mask()),
        f"{name}: atten_mask must be true above the diagonal and false elsewhere",
    )


@cache
def _causal_mask() -> Tensor:
    return torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def _pages_of_tokens(cache: Tensor, heads: int, block_size: int) -> Tensor:
    """The cache as [P, S, K, D]."""
    pages = cache.transpose(1, 2) if cache.dim() == 4 else cache.unflatten(2, (heads, -1))
    check(
        pages.shape[1] == block_size and pages.shape[2] == heads,
        f"npu_fused_infer_attention_score: a cache of {list(cache.shape)} has not block_size "
        f"{block_size} and {heads} heads",
    )
    return pages


def _read_pages(cache: Tensor, pages: Tensor, length: int) -> Tensor:
    """The first `length` tokens [length, K, D] that lie in `pages` of a cache [P, S, K, D]."""
    needed = -(-length // cache.shape[1])
    check(
        needed <= len(pages),
        f"the block table has {len(pages)} pages a request, {length} tokens need {needed}",
    )
    return cache[pages[:needed].long()].flatten(0, 1)[:length]


def _attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """(output [T, N, D], log-sum-exp [T, N]) of query [T, N, D] over key and value [L, K, D], in
    float32 inside.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.float().repeat_interleave(groups, 1) for tensor in (key, value))
    scores = torch.einsum("tnd,lnd->tnl", query.float(), key) * scale
    if causal:
        after = torch.ones(len(query), len(key), dtype=torch.bool).triu(len(key) - len(query) + 1)
        scores = scores.masked_fill(after[:, None], float("-inf"))
    return torch.einsum("tnl,lnd->tnd", scores.softmax(-1), value).to(
        query.dtype
    ), scores.logsumexp(-1)


def _attention_shapes(
    query: Tensor, key: Tensor, value: Tensor, **others: Any
) -> tuple[Tensor, Tensor]:
    shape = (query.shape[0], query.shape[1], 1) if others.get("softmax_lse_flag") else (0,)
    return torch.empty_like(query), query.new_empty(shape, dtype=torch.float32)


KERNELS: dict[str, Callable[..., Any]] = {
    "npu::npu_rms_norm": npu_rms_norm,
    "npu::npu_add_rms_norm": npu_add_rms_norm,
    "npu::npu_swiglu": npu_swiglu,
    "npu::npu_grouped_matmul": npu_grouped_matmul,
    "npu::npu_rotary_mul": npu_rotary_mul,
    "npu::npu_fused_infer_attention_score": npu_fused_infer_attention_score,
    "atb::_npu_reshape_and_cache": npu_reshape_and_cache,
    "atb::_npu_paged_attention": npu_paged_attention,
    **quantized_ops.KERNELS,
    **collectives.KERNELS,
}

SHAPES: dict[str, Callable[..., Any]] = {
    "npu::npu_rms_norm": npu_rms_norm,
    "npu::npu_add_rms_norm": npu_add_rms_norm,
    "npu::npu_swiglu": npu_swiglu,
    "npu::npu_grouped_matmul": npu_grouped_matmul,
    "npu::npu_rotary_mul": npu_rotary_mul,
    "npu::npu_fused_infer_attention_score": _attention_shapes,
    **quantized_ops.KERNELS,
    **collectives.SHAPES,
}
"""What runs on meta tensors; torch_npu has none for the atb ops."""
