"""Triton kernels of paged attention: storing keys and values, prefill over a prefix, decode split
over the keys.

T tokens, B requests, H query heads, K key/value heads, D head size, S tokens in a page. The query
heads that share a key/value head (`GROUP` = H / K of them) are rows of one tile, so each key is
read once for all of them. Softmax runs online in base 2 (arXiv:2205.14135). A split of the keys
writes its partial sum and the logarithm of its weight (arXiv:2311.01282). Offsets into the cache
are 64 bits wide, because it may hold more than 2^31 numbers.

`KIND` is that of `cache_kernels`. `k_scales` and `v_scales` [P, K, S] are read for int8 only.
`value_scale` is the scale of values in float8.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .cache_kernels import normalised, relaid, widened
from .quantize_kernels import quantized


@triton.jit
def store_kernel(
    k,
    v,
    k_cache,
    v_cache,
    slots,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    page_stride,
    slot_stride,
    head_stride,
    KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Program t copies k[t], v[t] [K, D] to slot `slots[t]`. If the slot is negative, nothing is
    stored.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    index = tl.arange(0, BLOCK)
    head = index // HEAD
    dim = index % HEAD
    live = (index < KV_HEADS * HEAD) & (slot >= 0)
    slot = tl.maximum(slot, 0)
    target = (slot // PAGE) * page_stride + (slot % PAGE) * slot_stride + head * head_stride + dim
    tl.store(
        k_cache + target,
        tl.load(k + token * k_stride_t + head * k_stride_h + dim, mask=live, other=0.0),
        mask=live,
    )
    tl.store(
        v_cache + target,
        tl.load(v + token * v_stride_t + head * v_stride_h + dim, mask=live, other=0.0),
        mask=live,
    )


@triton.jit
def _attend(
    total,
    peak,
    weight,
    query,
    position,
    k_head,
    v_head,
    k_scales,
    v_scales,
    pages,
    low,
    high,
    page_stride,
    slot_stride,
    scale_log2,
    cap_log2,
    slope_log2,
    HEAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    KIND: tl.constexpr,
    NATIVE: tl.constexpr,
    CAPPED: tl.constexpr,
    SLOPES: tl.constexpr,
):
    """Add the keys [low, high) to the running sum `total` [M, D] with its `peak` and `weight` [M],
    for `query` [M, D] at `position` [M]. Scores are multiplied by `scale_log2` [M].

    `WINDOW` 0: all keys up to the position. Without `MASKED`, every query sees all these keys, and
    their number is a multiple of `BLOCK_N`. `CAPPED`: scores are softly limited to `cap_log2`.
    `SLOPES`: scores fall by `slope_log2` [M] per key before the position.
    """
    dim = tl.arange(0, BLOCK_D)
    for first in range(low, high, BLOCK_N):
        key = first + tl.arange(0, BLOCK_N)
        inside = key < high
        page = tl.load(pages + key // PAGE, mask=inside, other=0).to(tl.int64)
        offset = page * page_stride + (key % PAGE) * slot_stride
        readable = inside[:, None] & (dim < HEAD)[None, :]
        keys = tl.load(k_head + offset[:, None] + dim[None, :], mask=readable, other=0.0)
        if KIND != 0:
            keys = relaid(widened(keys, KIND, NATIVE).to(query.dtype))
        score = tl.dot(query, tl.trans(keys), input_precision=PRECISION) * scale_log2[:, None]
        if KIND == 3:
            place = page * (page_stride // 2) + key % PAGE
            score = (
                score * tl.load(k_scales + place, mask=inside, other=0.0).to(tl.float32)[None, :]
            )
        if CAPPED:
            # cap * tanh(score / cap)
            score = cap_log2 - 2 * cap_log2 / (tl.exp2(score * (2.885390082 / cap_log2)) + 1)
        if SLOPES:
            score += slope_log2[:, None] * (key[None, :] - position[:, None]).to(tl.float32)
        if MASKED:
            visible = (key[None, :] <= position[:, None]) & inside[None, :]
            if WINDOW > 0:
                visible = visible & (key[None, :] > position[:, None] - WINDOW)
            score = tl.where(visible, score, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1))
        # A row without any visible key has the peak -inf, and -inf - -inf is NaN.
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        share = tl.exp2(score - base[:, None])
        fade = tl.exp2(peak - base)
        weight = weight * fade + tl.sum(share, 1)
        values = tl.load(v_head + offset[:, None] + dim[None, :], mask=readable, other=0.0)
        if KIND == 3:
            by = tl.load(v_scales + place, mask=inside, other=0.0).to(tl.float32)
            values = relaid((widened(values, KIND, NATIVE) * by[:, None]).to(query.dtype))
        elif KIND != 0:
            values = relaid(widened(values, KIND, NATIVE).to(query.dtype))
        total = total * fade[:, None] + tl.dot(
            share.to(values.dtype), values, input_precision=PRECISION
        )
        peak = new_peak
    return total, peak, weight


@triton.jit
def _store_result(q, out, out_scale, place, result, live, QUANTIZED: tl.constexpr):
    """Store result float32 at out + place.

    If QUANTIZED is above 0, the result is rounded to q's dtype, divided by `out_scale`, and stored
    as FP8 with a mantissa of QUANTIZED digits.
    """
    if QUANTIZED == 0:
        number = result.to(out.dtype.element_ty)
    else:
        number = result.to(q.dtype.element_ty).to(tl.float32)
        scale = tl.load(out_scale) + tl.zeros_like(number)
        if QUANTIZED == 3:
            number = quantized(number, scale, 448.0, 3, 7)
        else:
            number = quantized(number, scale, 57344.0, 2, 15)
    tl.store(out + place, number, mask=live)


@triton.jit(do_not_specialize=["table_stride"])
def prefill_kernel(
    q, out, out_scale, k_cache, v_cache, k_scales, v_scales, tiles, query_starts, seq_lens,
    block_table, q_stride_t, q_stride_h, out_stride_t, out_stride_h, page_stride, slot_stride,
    head_stride, table_stride, scale_log2, value_scale, cap_log2, sinks, slopes,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    KIND: tl.constexpr,
    NATIVE: tl.constexpr,
    QUANTIZED: tl.constexpr,
    CAPPED: tl.constexpr, SINKS: tl.constexpr, SLOPES: tl.constexpr,
):  # fmt: skip
    """Program (tile, kv head): `BLOCK_M / GROUP_PAD` tokens of one request, each with its GROUP
    heads, over all keys before them.

    tiles [.., 2]: the request and the first of its new tokens.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    request = tl.load(tiles + 2 * tile)
    first = tl.load(tiles + 2 * tile + 1)
    start = tl.load(query_starts + request)
    query_len = tl.load(query_starts + request + 1) - start
    seq_len = tl.load(seq_lens + request)
    past = seq_len - query_len

    row = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    token = first + row // GROUP_PAD
    head = kv_head * GROUP + row % GROUP_PAD
    live = ((token < query_len) & (row % GROUP_PAD < GROUP))[:, None] & (dim < HEAD)[None, :]
    step_row = (start + token).to(tl.int64)
    query = tl.load(
        q + step_row[:, None] * q_stride_t + head[:, None] * q_stride_h + dim[None, :],
        mask=live,
        other=0.0,
    )
    query, factor = normalised(query, scale_log2, NATIVE)
    position = past + token

    high = past + tl.minimum(first + BLOCK_M // GROUP_PAD, query_len)
    low = 0
    clear = ((past + first + 1) // BLOCK_N) * BLOCK_N
    if WINDOW > 0:
        low = tl.maximum(past + first - WINDOW + 1, 0)
        clear = low
    pages = block_table + request.to(tl.int64) * table_stride
    k_head = k_cache + kv_head * head_stride
    v_head = v_cache + kv_head * head_stride
    k_scales += kv_head * PAGE
    v_scales += kv_head * PAGE
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        peak = tl.load(sinks + head, mask=row % GROUP_PAD < GROUP, other=0.0) * 1.442695041
        weight += 1.0  # The sink's score has no value.
    slope = tl.zeros([BLOCK_M], tl.float32)
    if SLOPES:
        slope = tl.load(slopes + head, mask=row % GROUP_PAD < GROUP, other=0.0) * 1.442695041
    if WINDOW == 0:
        total, peak, weight = _attend(
            total, peak, weight, query, position, k_head, v_head, k_scales, v_scales, pages, low,
            clear, page_stride, slot_stride, factor, cap_log2, slope, HEAD, BLOCK_D, BLOCK_N,
            PAGE, WINDOW, False, PRECISION, KIND, NATIVE, CAPPED, SLOPES,
        )  # fmt: skip
    total, peak, weight = _attend(
        total, peak, weight, query, position, k_head, v_head, k_scales, v_scales, pages, clear,
        high, page_stride, slot_stride, factor, cap_log2, slope, HEAD, BLOCK_D, BLOCK_N, PAGE,
        WINDOW, True, PRECISION, KIND, NATIVE, CAPPED, SLOPES,
    )  # fmt: skip
    result = total * value_scale / tl.where(weight == 0.0, 1.0, weight)[:, None]
    place = step_row[:, None] * out_stride_t + head[:, None] * out_stride_h + dim[None, :]
    _store_result(q, out, out_scale, place, result, live, QUANTIZED)


@triton.jit
def split_length(
    sizes, visible, num_splits, wanted, least, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return the keys of a split, a multiple of BLOCK_N. `num_splits` splits hold the longest
    sequence.

    sizes [2]: the keys of all decodes and of the longest. `wanted` splits fill the device. A split
    has `least` keys at least. In a window the `visible` keys of a request are divided evenly.
    """
    length = tl.cdiv(visible, num_splits)
    if WINDOW == 0:
        shares = tl.cdiv(tl.load(sizes), wanted)
        length = tl.cdiv(tl.load(sizes + 1), num_splits)
        length = tl.maximum(tl.maximum(length, shares), least).to(tl.int32)
    return tl.cdiv(length, BLOCK_N) * BLOCK_N


@triton.jit(do_not_specialize=["table_stride", "num_splits", "wanted", "least"])
def decode_kernel(
    q, out, out_scale, partial, partial_lse, k_cache, v_cache, k_scales, v_scales, rows, requests,
    seq_lens, block_table, q_stride_t, q_stride_h, out_stride_t, out_stride_h, page_stride,
    slot_stride, head_stride, table_stride, scale_log2, value_scale, cap_log2, sinks, slopes,
    num_heads, sizes, num_splits, wanted, least,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    DIRECT: tl.constexpr,
    PRECISION: tl.constexpr,
    KIND: tl.constexpr,
    NATIVE: tl.constexpr,
    QUANTIZED: tl.constexpr,
    CAPPED: tl.constexpr, SINKS: tl.constexpr, SLOPES: tl.constexpr,
):  # fmt: skip
    """Program (decode, kv head, split): one token with its GROUP heads over the split's share of
    the keys.

    rows, requests [N]: the row of the token in the step, and its request. With `DIRECT` there is
    one split, whose result goes to `out`. Otherwise results go to `partial` [N, H, num_splits, D]
    and `partial_lse` [N, H, num_splits], both float32.
    """
    decode = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    step_row = tl.load(rows + decode).to(tl.int64)
    request = tl.load(requests + decode).to(tl.int64)
    seq_len = tl.load(seq_lens + request)

    row = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + row
    live = (row < GROUP)[:, None] & (dim < HEAD)[None, :]
    query = tl.load(
        q + step_row * q_stride_t + head[:, None] * q_stride_h + dim[None, :], mask=live, other=0.0
    )

    query, factor = normalised(query, scale_log2, NATIVE)
    begin = seq_len * 0
    if WINDOW > 0:
        begin = tl.maximum(seq_len - WINDOW, 0)
    low = begin
    high = seq_len
    if not DIRECT:
        length = split_length(sizes, seq_len - begin, num_splits, wanted, least, WINDOW, BLOCK_N)
        low = begin + split * length
        high = tl.minimum(low + length, seq_len)
    position = tl.zeros([BLOCK_M], tl.int32) + (seq_len - 1)
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        sink = tl.load(sinks + head, mask=row < GROUP, other=0.0) * 1.442695041
        peak = tl.where(split == 0, sink, peak)
        weight += tl.where(split == 0, 1.0, 0.0)
    slope = tl.zeros([BLOCK_M], tl.float32)
    if SLOPES:
        slope = tl.load(slopes + head, mask=row < GROUP, other=0.0) * 1.442695041
    total, peak, weight = _attend(
        total, peak, weight, query, position, k_cache + kv_head * head_stride,
        v_cache + kv_head * head_stride, k_scales + kv_head * PAGE, v_scales + kv_head * PAGE,
        block_table + request * table_stride, low, high, page_stride, slot_stride, factor,
        cap_log2, slope, HEAD, BLOCK_D, BLOCK_N, PAGE, 0, True, PRECISION, KIND, NATIVE,
        CAPPED, SLOPES,
    )  # fmt: skip
    weight = tl.where(weight == 0.0, 1.0, weight)
    result = total * value_scale / weight[:, None]
    if DIRECT:
        place = step_row * out_stride_t + head[:, None] * out_stride_h + dim[None, :]
        _store_result(q, out, out_scale, place, result, live, QUANTIZED)
    else:
        place = ((decode.to(tl.int64) * num_heads + head) * num_splits) + split
        # Nothing reads splits without keys, but the first.
        written = (split == 0) | (low < high)
        tl.store(partial + place[:, None] * HEAD + dim[None, :], result, mask=live & written)
        tl.store(partial_lse + place, peak + tl.log2(weight), mask=(row < GROUP) & written)


@triton.jit(do_not_specialize=["num_splits", "wanted", "least"])
def combine_kernel(
    partial,
    partial_lse,
    q,
    out,
    out_scale,
    rows,
    requests,
    seq_lens,
    out_stride_t,
    out_stride_h,
    num_heads,
    sizes,
    num_splits,
    wanted,
    least,
    HEAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    QUANTIZED: tl.constexpr,
):
    """Program (decode, head): the sum of the splits' results by weight."""
    decode = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.arange(0, MAX_SPLITS)
    dim = tl.arange(0, BLOCK_D)
    visible = tl.load(seq_lens + tl.load(requests + decode).to(tl.int64))
    if WINDOW > 0:
        visible = tl.minimum(visible, WINDOW)
    length = split_length(sizes, visible, num_splits, wanted, least, WINDOW, BLOCK_N)
    live = split < tl.maximum(tl.cdiv(visible, tl.maximum(length, 1)), 1)
    place = (decode.to(tl.int64) * num_heads + head) * num_splits + split
    lse = tl.load(partial_lse + place, mask=live, other=float("-inf"))
    peak = tl.max(lse, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    share = tl.exp2(lse - base)
    readable = live[:, None] & (dim < HEAD)[None, :]
    results = tl.load(partial + place[:, None] * HEAD + dim[None, :], mask=readable, other=0.0)
    weight = tl.sum(share, 0)
    result = tl.sum(results * share[:, None], 0) / tl.where(weight == 0.0, 1.0, weight)
    step_row = tl.load(rows + decode).to(tl.int64)
    place = step_row * out_stride_t + head * out_stride_h + dim
    _store_result(q, out, out_scale, place, result, dim < HEAD, QUANTIZED)
