"""Paged attention in Triton: the attention backend of GPUs that needs only torch.

Shapes as in `kernels.attention`: T tokens, B requests, H query heads, K key/value heads, D head
size, S tokens in a page.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from ..attention import AttentionMetadata, KVLayout
from ..cache_format import open_int8
from ..staging import to_device
from .attention_kernels import combine_kernel, decode_kernel, prefill_kernel, store_kernel
from .cache_kernels import store_bytes_kernel
from .quantize import BITS
from .tiles import power_of_2

MAX_SPLITS = 32
# Least decode programs per multiprocessor. Keys are split until there are as many.
_PROGRAMS_PER_PROCESSOR = 2
# `KIND` of cache_kernels.
_KINDS = {None: 0, torch.float8_e4m3fn: 1, torch.float8_e5m2: 2, torch.int8: 3}
_SPLIT_TOKENS = 128  # Combining a split with fewer keys costs more than it saves.


@dataclass(slots=True, kw_only=True)
class TritonPlan:
    """The plan that the layers of a step share, on the device, int32 unless noted.

    Attributes:
        slots, block_table: [T] and [B, pages], int64 or int32.
        query_starts, seq_lens: [B + 1] and [B].
        rows, requests: [decodes], the row of a decode's token in the step, and its request.
        prefills: (request, new tokens) of each request with several new tokens.
        longest: Tokens of the longest sequence that is decoded.
        fixed: The plan is updated for later steps, so each query is a decode.
        tiles: By tokens in a tile: [tiles, 2], what each prefill program computes.
    """

    slots: torch.Tensor
    block_table: torch.Tensor
    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    rows: torch.Tensor
    requests: torch.Tensor
    prefills: list[tuple[int, int]]
    longest: int
    page_size: int
    fixed: bool = False
    tiles: dict[int, torch.Tensor] = field(default_factory=dict)


class Blocks(NamedTuple):
    """Rows and keys of a tile."""

    rows: int
    keys: int


class TritonAttention:
    """Store keys and values, then launch one kernel for prefills and one or two for decodes.

    `blocks` and `num_splits` override the sizes that are chosen from the shapes.
    """

    def __init__(self, *, blocks: Blocks | None = None, num_splits: int | None = None) -> None:
        self._blocks = blocks
        self._num_splits = num_splits

    def plan(self, metadata: AttentionMetadata, page_size: int) -> TritonPlan:
        query_lens, seq_lens = (
            np.array(metadata.query_lens, np.int32),
            np.array(metadata.seq_lens, np.int32),
        )
        starts = np.zeros(len(query_lens) + 1, np.int32)
        query_lens.cumsum(out=starts[1:])
        decodes = np.flatnonzero(query_lens == 1).astype(np.int32)
        prefills = np.flatnonzero(query_lens > 1)
        tensors = to_device(
            [starts, seq_lens, starts[:-1][decodes], decodes], metadata.block_table.device
        )
        return TritonPlan(
            slots=metadata.slot_mapping,
            block_table=metadata.block_table,
            query_starts=tensors[0],
            seq_lens=tensors[1],
            rows=tensors[2],
            requests=tensors[3],
            prefills=list(zip(prefills.tolist(), query_lens[prefills].tolist(), strict=True)),
            longest=int(seq_lens[decodes].max(initial=0)),
            page_size=page_size,
        )

    def capture_plan(
        self, max_batch_size: int, max_pages: int, page_size: int, device: torch.device
    ) -> TritonPlan:
        places = torch.arange(max_batch_size, dtype=torch.int32, device=device)
        return TritonPlan(
            slots=torch.full((max_batch_size,), -1, dtype=torch.int64, device=device),
            block_table=torch.zeros(max_batch_size, max_pages, dtype=torch.int64, device=device),
            query_starts=torch.arange(max_batch_size + 1, dtype=torch.int32, device=device),
            seq_lens=torch.zeros(max_batch_size, dtype=torch.int32, device=device),
            rows=places,
            requests=places,
            prefills=[],
            longest=max_pages * page_size,
            page_size=page_size,
            fixed=True,
        )

    def update_plan(self, plan: TritonPlan, metadata: AttentionMetadata, batch_size: int) -> None:
        count, width = (
            len(metadata.seq_lens),
            min(metadata.block_table.shape[1], plan.block_table.shape[1]),
        )
        assert plan.fixed and all(length == 1 for length in metadata.query_lens), (
            "a recorded plan takes decodes only"
        )
        assert count <= len(plan.slots) and max(metadata.seq_lens) <= plan.longest, (
            "the step is larger than the plan"
        )
        lens = np.zeros(len(plan.seq_lens), np.int32)
        lens[:count] = metadata.seq_lens
        plan.seq_lens.copy_(to_device([lens], plan.seq_lens.device)[0])
        plan.block_table[:count, :width].copy_(metadata.block_table[:, :width])
        plan.slots[:count].copy_(metadata.slot_mapping)
        plan.slots[count:].fill_(-1)

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: TritonPlan,
        layout: KVLayout,
    ) -> None:
        self.run_quantized(q, k, v, out, None, k_cache, v_cache, plan, layout)

    def run_quantized(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        scale: torch.Tensor | None,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: TritonPlan,
        layout: KVLayout,
    ) -> None:
        """`scale` is None if `out` has q's dtype."""
        assert all(one.stride(-1) == 1 for one in (q, k, v, out, k_cache))
        # A fixed plan may have more rows than this graph has queries. A padded step has more
        # queries than tokens.
        num_new = min(len(plan.slots), len(q))
        num_decodes = len(q) if plan.fixed else len(plan.rows)
        store_keys_and_values(k, v, k_cache, v_cache, plan.slots[:num_new], layout)
        keys, values = (_Pages.of(cache, layout) for cache in (k_cache, v_cache))
        layer = _Layer(q, _Output.of(out, scale), keys, values, plan, layout)
        if plan.prefills:
            _prefill(layer, self._blocks or _prefill_blocks(layer))
        if num_decodes:
            blocks = self._blocks or _decode_blocks(layer)
            splits = self._num_splits or _num_splits(
                num_decodes * layout.num_kv_heads,
                min(plan.longest, layout.window or plan.longest),
                q.device,
            )
            _decode(layer, num_decodes, blocks, splits)


class _Pages(NamedTuple):
    """Keys or values for kernels: `numbers` [P, S, K, D], as bytes if they have 8 bits, and
    `scales` [P, K, S], read only for int8.
    """

    numbers: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def of(cls, cache: torch.Tensor, layout: KVLayout) -> _Pages:
        if layout.cache_dtype is None:
            return cls(cache, cache)
        if layout.cache_dtype != torch.int8:
            numbers = cache.view(torch.uint8)
            return cls(numbers, numbers)
        numbers, scales = open_int8(cache, layout.num_kv_heads, layout.key_size)
        return cls(numbers.view(torch.uint8), scales)


class _Output(NamedTuple):
    """The result: `numbers` [T, H, D], FP8 as bytes. `digits` is the size of FP8's mantissa. 0: the
    dtype is q's, and `scale` is not read.
    """

    numbers: torch.Tensor
    scale: torch.Tensor
    digits: int

    @classmethod
    def of(cls, out: torch.Tensor, scale: torch.Tensor | None) -> _Output:
        if scale is None:
            return cls(out, out, 0)
        return cls(out.view(torch.uint8), scale, BITS[out.dtype][0])


class _Layer(NamedTuple):
    """The arguments of one `run`."""

    q: torch.Tensor
    out: _Output
    keys: _Pages
    values: _Pages
    plan: TritonPlan
    layout: KVLayout

    @property
    def scale(self) -> float:
        """For exponents of base 2."""
        return self.layout.scale * self.layout.k_scale * math.log2(math.e)

    @property
    def bounds(self) -> tuple[float, torch.Tensor, torch.Tensor]:
        """The soft cap for exponents of base 2, the sinks and the slopes. `kinds` says
        which exist.
        """
        cap, *of_heads = self.layout.softcap, self.layout.sinks, self.layout.slopes
        sinks, slopes = (self.q if each is None else each for each in of_heads)
        return (cap or 0.0) * math.log2(math.e), sinks, slopes

    @property
    def kinds(self) -> dict[str, bool]:
        layout = self.layout
        given = {"CAPPED": layout.softcap, "SINKS": layout.sinks, "SLOPES": layout.slopes}
        return {name: each is not None for name, each in given.items()}

    @property
    def caches(self) -> tuple[torch.Tensor, ...]:
        return self.keys.numbers, self.values.numbers, self.keys.scales, self.values.scales

    @property
    def window(self) -> int:
        """0 for no window."""
        return self.layout.window or 0

    @property
    def group(self) -> int:
        return self.layout.num_heads // self.layout.num_kv_heads

    @property
    def head_block(self) -> int:
        """Head size as a block: a power of two that matrix instructions support."""
        return max(16, power_of_2(self.layout.key_size))

    @property
    def strides(self) -> tuple[int, ...]:
        cache, table = self.keys.numbers.stride()[:3], self.plan.block_table.stride(0)
        return (
            self.q.stride(0),
            self.q.stride(1),
            *self.out.numbers.stride()[:2],
            *cache,
            table,
        )


def store_keys_and_values(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    layout: KVLayout,
) -> None:
    """Store k, v [T, K, D] at their slots [T] of the caches [P, S, K, D], or of 8-bit caches.
    Tokens with a negative slot are not stored.
    """
    kv_heads, head_size = k.shape[1:]
    if not len(slots):
        return
    if layout.cache_dtype is not None:
        keys, values = (_Pages.of(cache, layout) for cache in (k_cache, v_cache))
        store_bytes_kernel[(len(slots),)](
            k, v, keys.numbers, values.numbers, keys.scales, values.scales, slots,
            *k.stride()[:2], *v.stride()[:2], keys.numbers.stride(0), layout.k_scale,
            layout.v_scale, KV_HEADS=kv_heads, HEAD=head_size, HEADS_BLOCK=power_of_2(kv_heads),
            BLOCK=power_of_2(head_size), PAGE=keys.numbers.shape[1],
            KIND=_KINDS[layout.cache_dtype], num_warps=4,
        )  # fmt: skip
        return
    assert k_cache.stride() == v_cache.stride()
    store_kernel[(len(slots),)](
        k, v, k_cache, v_cache, slots, *k.stride()[:2], *v.stride()[:2], *k_cache.stride()[:3],
        KV_HEADS=kv_heads, HEAD=head_size, BLOCK=power_of_2(kv_heads * head_size),
        PAGE=k_cache.shape[1], num_warps=4,
    )  # fmt: skip


def _prefill(layer: _Layer, blocks: Blocks) -> None:
    plan, head_size = layer.plan, layer.layout.key_size
    group_pad = power_of_2(layer.group)
    block_m = max(blocks.rows, group_pad)
    tiles = _tiles(plan, block_m // group_pad)
    prefill_kernel[(len(tiles), layer.layout.num_kv_heads)](
        layer.q, *layer.out[:2], *layer.caches, tiles, plan.query_starts, plan.seq_lens,
        plan.block_table, *layer.strides, layer.scale, layer.layout.v_scale, *layer.bounds,
        GROUP=layer.group, GROUP_PAD=group_pad, HEAD=head_size, BLOCK_M=block_m,
        BLOCK_N=blocks.keys, BLOCK_D=layer.head_block, PAGE=plan.page_size, WINDOW=layer.window,
        PRECISION="ieee", KIND=_KINDS[layer.layout.cache_dtype], QUANTIZED=layer.out.digits,
        **layer.kinds, num_warps=8 if block_m >= 128 else 4, num_stages=2,
    )  # fmt: skip


def _decode(layer: _Layer, count: int, blocks: Blocks, splits: int) -> None:
    plan, heads, head_size = layer.plan, layer.layout.num_heads, layer.layout.key_size
    direct = splits == 1
    # Without splits the kernel uses neither tensor.
    partial = (
        layer.q
        if direct
        else layer.q.new_empty(count, heads, splits, head_size, dtype=torch.float32)
    )
    partial_lse = (
        layer.q if direct else layer.q.new_empty(count, heads, splits, dtype=torch.float32)
    )
    decode_kernel[(count, layer.layout.num_kv_heads, splits)](
        layer.q, *layer.out[:2], partial, partial_lse, *layer.caches, plan.rows,
        plan.requests, plan.seq_lens, plan.block_table, *layer.strides, layer.scale,
        layer.layout.v_scale, *layer.bounds, heads, splits, KIND=_KINDS[layer.layout.cache_dtype],
        GROUP=layer.group, BLOCK_M=max(16, power_of_2(layer.group)), HEAD=head_size,
        BLOCK_N=blocks.keys, BLOCK_D=layer.head_block, PAGE=plan.page_size, WINDOW=layer.window,
        DIRECT=direct, PRECISION="ieee", QUANTIZED=layer.out.digits, **layer.kinds, num_warps=4,
        num_stages=2,
    )  # fmt: skip
    if not direct:
        combine_kernel[(count, heads)](
            partial, partial_lse, layer.q, *layer.out[:2], plan.rows,
            *layer.out.numbers.stride()[:2], heads, splits, HEAD=head_size,
            BLOCK_D=layer.head_block, MAX_SPLITS=MAX_SPLITS, QUANTIZED=layer.out.digits,
            num_warps=4,
        )  # fmt: skip


def _tiles(plan: TritonPlan, tokens: int) -> torch.Tensor:
    """Return [tiles, 2] int32: the request and the first new token of every tile. Long prompts come
    first, so that the last programs to end are short.
    """
    tiles = plan.tiles.get(tokens)
    if tiles is None:
        parts = [
            np.stack(
                np.broadcast_arrays(np.int32(request), np.arange(0, new, tokens, dtype=np.int32)), 1
            )
            for request, new in plan.prefills
        ]
        every = np.concatenate(parts)
        # The later a tile is in its prompt, the more keys it reads.
        every = np.ascontiguousarray(every[np.argsort(-every[:, 1], kind="stable")])
        tiles = plan.tiles[tokens] = to_device([every], plan.seq_lens.device)[0]
    return tiles


def _prefill_blocks(layer: _Layer) -> Blocks:
    """Return tiles that fill the matrix units and fit a multiprocessor's shared memory."""
    if layer.q.element_size() == 4:
        return Blocks(32, 32)
    rows = max(new for _, new in layer.plan.prefills) * power_of_2(layer.group)
    return Blocks(128 if rows >= 128 else 64, 64 if layer.head_block <= 128 else 32)


def _decode_blocks(layer: _Layer) -> Blocks:
    return Blocks(16, 32 if layer.q.element_size() == 4 or layer.head_block > 128 else 64)


def _num_splits(programs: int, longest: int, device: torch.device) -> int:
    """Return a power of two that gives every multiprocessor enough programs, and no split fewer
    than about `_SPLIT_TOKENS` keys.
    """
    wanted = min(
        _PROGRAMS_PER_PROCESSOR * _processors(device) / programs,
        longest / _SPLIT_TOKENS,
        MAX_SPLITS,
    )
    return 1 << max(0, math.floor(math.log2(max(wanted, 1))))


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
