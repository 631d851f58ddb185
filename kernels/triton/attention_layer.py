"""One layer of paged attention in Triton: what a step's kernels are launched with.

Shapes as in `kernels.attention`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from triton import OutOfResources

from ..attention import KVLayout
from ..cache_format import open_int8
from ..staging import to_device
from . import device as devices
from .attention_kernels import combine_kernel, decode_kernel, prefill_kernel, store_kernel
from .attention_plan import Floats, Kept, Launches, Tensors, TritonPlan
from .attention_tiles import (
    MAX_SPLITS,
    Blocks,
    Splits,
    chosen_splits,
    decode_blocks,
    prefill_blocks,
    window_splits,
)
from .cache_kernels import store_bytes_kernel
from .launches import Launch, Moving, Value, first_accepted, launch
from .quantize import BITS
from .tiles import power_of_2

# `KIND` of cache_kernels.
_KINDS = {None: 0, torch.float8_e4m3fn: 1, torch.float8_e5m2: 2, torch.int8: 3}


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

    def moving(self, source: int) -> tuple[Moving, Moving]:
        """Return both as arguments of a launch to repeat."""
        offset = self.scales.data_ptr() - self.numbers.data_ptr()
        return Moving(self.numbers, source), Moving(self.scales, source, offset)


class Layer:
    """The launches of one layer in one step."""

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        scale: torch.Tensor | None,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: TritonPlan,
        kept: Kept,
    ) -> None:
        assert all(one.stride(-1) == 1 for one in (q, k, v, out, k_cache))
        self._plan, self._kept, self._layout = plan, kept, kept.layout
        self._q, self._k, self._v = Moving(q, Tensors.Q), Moving(k, Tensors.K), Moving(v, Tensors.V)
        # FP8 is written as bytes, with a mantissa of `digits`. 0 digits: the dtype is q's.
        self._digits = 0 if scale is None else BITS[out.dtype][0]
        self._numbers = out if scale is None else out.view(torch.uint8)
        self._out = (
            Moving(self._numbers, Tensors.OUT),
            Moving(out, Tensors.OUT) if scale is None else Moving(scale, Tensors.SCALE),
        )
        self._keys = _Pages.of(k_cache, self._layout)
        self._values = _Pages.of(v_cache, self._layout)

    def run(self, blocks: Blocks | None, splits: Splits | None) -> Launches | None:
        """Launch all kernels. Return what repeats the launches, or None if nothing does."""
        plan, q = self._plan, self._q.tensor
        # A fixed plan may have more rows than this graph has queries. A padded step has more
        # queries than tokens.
        num_new = min(len(plan.slots), len(q))
        num_decodes = len(q) if plan.fixed else len(plan.rows)
        launches, shape = [], None
        if num_new:
            launches.append(self._store(plan.slots[:num_new]))
        properties = devices.properties(q.device)
        if plan.prefills:
            rows = max(new for _, new in plan.prefills) * power_of_2(self._kept.shape.group)
            choices = [blocks] if blocks else prefill_blocks(self._kept.shape, rows, properties)
            launches.append(self._first("prefill", choices, self._prefill))
        if num_decodes:
            splits = splits or self._splits(num_decodes, properties)
            choices = [blocks] if blocks else decode_blocks(self._kept.shape, properties)
            partial = q
            if splits.number > 1:
                # Each split writes its result, and the logarithm of its weight.
                heads, size = self._layout.num_heads, self._layout.key_size
                shape = (num_decodes * heads * splits.number * (size + 1),)
                partial = q.new_empty(shape, dtype=torch.float32)

            def decode(tile: Blocks) -> list[Launch | None]:
                return self._decode(num_decodes, tile, splits, partial)

            launches += self._first("decode", choices, decode)
        whole = [each for each in launches if each is not None]
        return (whole, shape) if len(whole) == len(launches) else None

    def _first(self, name: str, choices: list[Blocks], launch: Any) -> Any:
        """Launch with the first tile that the device accepts."""
        try:
            return first_accepted((name, self._kept.form, self._digits), choices, launch)
        except OutOfResources as refusal:
            raise ValueError(
                f"this GPU cannot run Triton's attention for heads of {self._layout.key_size} "
                f"({refusal}): start with --attention-backend torch"
            ) from refusal

    def _splits(self, count: int, properties: devices.Properties) -> Splits:
        plan, kv_heads = self._plan, self._layout.num_kv_heads
        if self._layout.window is not None:
            longest = min(plan.longest, self._layout.window)
            return window_splits(count, kv_heads, longest, properties)
        return chosen_splits(count, kv_heads, plan.total, plan.longest, plan.fixed, properties)

    def _store(self, slots: torch.Tensor) -> Launch | None:
        return _store(
            self._k,
            self._v,
            self._keys.moving(Tensors.K_CACHE),
            self._values.moving(Tensors.V_CACHE),
            slots,
            self._layout,
        )

    @property
    def _has_float8(self) -> bool:
        """Whether pages of float8 are widened by instructions, which exist from 8.9."""
        is_float8 = self._layout.cache_dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
        return is_float8 and devices.properties(self._q.tensor.device).capability >= (8, 9)

    @property
    def _caches(self) -> tuple[Moving, ...]:
        keys, values = self._keys.moving(Tensors.K_CACHE), self._values.moving(Tensors.V_CACHE)
        return keys[0], values[0], keys[1], values[1]

    @property
    def _strides(self) -> tuple[int, ...]:
        q, cache = self._q.tensor, self._keys.numbers.stride()[:3]
        table = self._plan.block_table.stride(0)
        return (q.stride(0), q.stride(1), *self._numbers.stride()[:2], *cache, table)

    @property
    def _bounds(self) -> tuple[Any, ...]:
        """The scales of scores and values, the soft cap, the sinks and the slopes. The kept `kinds`
        say which exist.
        """
        values, layout, q = self._kept.values, self._layout, self._q.tensor
        return (
            Value(values[Floats.SCORE_SCALE], Floats.SCORE_SCALE),
            Value(values[Floats.V_SCALE], Floats.V_SCALE),
            Value(values[Floats.CAP], Floats.CAP),
            Moving(q if layout.sinks is None else layout.sinks, Tensors.SINKS),
            Moving(q if layout.slopes is None else layout.slopes, Tensors.SLOPES),
        )

    def _constants(self, blocks: Blocks) -> dict[str, Any]:
        shape, layout = self._kept.shape, self._layout
        return {
            "GROUP": shape.group, "HEAD": shape.head_size, "BLOCK_N": blocks.keys,
            "BLOCK_D": shape.head_block, "PAGE": self._plan.page_size,
            "WINDOW": layout.window or 0, "PRECISION": "ieee",
            "KIND": _KINDS[layout.cache_dtype], "NATIVE": self._has_float8,
            "QUANTIZED": self._digits, **self._kept.kinds,
        }  # fmt: skip

    def _prefill(self, blocks: Blocks) -> Launch | None:
        plan, padded = self._plan, power_of_2(self._kept.shape.group)
        rows = max(blocks.rows, padded)
        tiles = _tiles(plan, rows // padded)
        return launch(
            prefill_kernel,
            (len(tiles), self._layout.num_kv_heads),
            (
                self._q, *self._out, *self._caches, tiles, plan.query_starts, plan.seq_lens,
                plan.block_table, *self._strides, *self._bounds,
            ),
            self._constants(blocks) | {"GROUP_PAD": padded, "BLOCK_M": rows},
            num_warps=blocks.warps,
            num_stages=2,
        )  # fmt: skip

    def _decode(
        self, count: int, blocks: Blocks, splits: Splits, partial: torch.Tensor
    ) -> list[Launch | None]:
        plan, heads, size = self._plan, self._layout.num_heads, self._layout.key_size
        direct = splits.number == 1
        # Without splits the kernel uses neither.
        results, weights = Moving(partial, Tensors.PARTIAL), Moving(partial, Tensors.PARTIAL)
        if not direct:
            numbers = count * heads * splits.number * size
            weights = Moving(partial[numbers:], Tensors.PARTIAL, numbers * partial.element_size())
        constants = self._constants(blocks)
        rows = max(16, power_of_2(self._kept.shape.group))
        launches = [
            launch(
                decode_kernel,
                (count, self._layout.num_kv_heads, splits.number),
                (
                    self._q, *self._out, results, weights, *self._caches, plan.rows,
                    plan.requests, plan.seq_lens, plan.block_table, *self._strides,
                    *self._bounds, heads, plan.sizes, *splits,
                ),
                constants | {"BLOCK_M": rows, "DIRECT": direct},
                num_warps=blocks.warps,
                num_stages=2,
            )
        ]  # fmt: skip
        if not direct:
            names = ("HEAD", "BLOCK_N", "BLOCK_D", "WINDOW", "QUANTIZED")
            launches.append(
                launch(
                    combine_kernel,
                    (count, heads),
                    (
                        results, weights, self._q, *self._out, plan.rows, plan.requests,
                        plan.seq_lens, *self._numbers.stride()[:2], heads, plan.sizes, *splits,
                    ),
                    {name: constants[name] for name in names} | {"MAX_SPLITS": MAX_SPLITS},
                    num_warps=4,
                )
            )  # fmt: skip
        return launches


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
    if len(slots):
        keys, values = (_Pages.of(cache, layout) for cache in (k_cache, v_cache))
        pages = keys.moving(Tensors.K_CACHE), values.moving(Tensors.V_CACHE)
        _store(Moving(k, Tensors.K), Moving(v, Tensors.V), *pages, slots, layout)


def _store(
    k: Moving,
    v: Moving,
    keys: tuple[Moving, Moving],
    values: tuple[Moving, Moving],
    slots: torch.Tensor,
    layout: KVLayout,
) -> Launch | None:
    kv_heads, size = k.tensor.shape[1:]
    strides = *k.tensor.stride()[:2], *v.tensor.stride()[:2]
    numbers = keys[0].tensor
    constants = {"KV_HEADS": kv_heads, "HEAD": size, "PAGE": numbers.shape[1]}
    if layout.cache_dtype is not None:
        return launch(
            store_bytes_kernel,
            (len(slots),),
            (
                k, v, keys[0], values[0], keys[1], values[1], slots, *strides, numbers.stride(0),
                Value(layout.k_scale, Floats.K_SCALE), Value(layout.v_scale, Floats.V_SCALE),
            ),
            constants
            | {"HEADS_BLOCK": power_of_2(kv_heads), "BLOCK": power_of_2(size)}
            | {"KIND": _KINDS[layout.cache_dtype]},
            num_warps=4,
        )  # fmt: skip
    assert numbers.stride() == values[0].tensor.stride()
    return launch(
        store_kernel,
        (len(slots),),
        (k, v, keys[0], values[0], slots, *strides, *numbers.stride()[:3]),
        constants | {"BLOCK": power_of_2(kv_heads * size)},
        num_warps=4,
    )


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
