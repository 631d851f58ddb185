"""Paged attention in Triton: the attention backend of GPUs that needs only torch.

Shapes as in `kernels.attention`: T tokens, B requests, H query heads, K key/value heads, D head
size, S tokens in a page.
"""

from __future__ import annotations

import numpy as np
import torch
from triton.runtime import driver

from ..attention import AttentionMetadata, KVLayout
from ..staging import to_device
from . import device as devices
from .attention_layer import Layer, store_keys_and_values
from .attention_plan import Kept, TritonPlan
from .attention_tiles import Blocks, Splits
from .attention_tiles import obstacle as tiles_obstacle
from .launches import are_aligned

__all__ = ["Blocks", "TritonAttention", "TritonPlan", "obstacle", "store_keys_and_values"]

_MOST_LAYOUTS = 1024  # Layouts of layers that are kept; a model has one per layer.


def obstacle(layout: KVLayout, device: torch.device) -> str | None:
    """Return why this device cannot compute a layer's attention, or None."""
    return tiles_obstacle(Kept.of(layout).shape, devices.properties(device))


class TritonAttention:
    """Store keys and values, then launch one kernel for prefills and one or two for decodes.

    `blocks` and `num_splits` override the sizes that are chosen from the shapes.
    """

    def __init__(self, *, blocks: Blocks | None = None, num_splits: int | None = None) -> None:
        self._blocks = blocks
        self._splits = None if num_splits is None else Splits(num_splits, 1 << 30, 1)
        self._kept: dict[int, Kept] = {}

    def plan(self, metadata: AttentionMetadata, page_size: int) -> TritonPlan:
        query_lens, seq_lens = (
            np.array(metadata.query_lens, np.int32),
            np.array(metadata.seq_lens, np.int32),
        )
        starts = np.zeros(len(query_lens) + 1, np.int32)
        query_lens.cumsum(out=starts[1:])
        decodes = np.flatnonzero(query_lens == 1).astype(np.int32)
        prefills = np.flatnonzero(query_lens > 1)
        decoded = seq_lens[decodes]
        total, longest = int(decoded.sum(dtype=np.int64)), int(decoded.max(initial=0))
        sizes = np.array([total, longest], np.int64)
        tensors = to_device(
            [starts, seq_lens, starts[:-1][decodes], decodes, sizes], metadata.block_table.device
        )
        return TritonPlan(
            slots=metadata.slot_mapping,
            block_table=metadata.block_table,
            query_starts=tensors[0],
            seq_lens=tensors[1],
            rows=tensors[2],
            requests=tensors[3],
            prefills=list(zip(prefills.tolist(), query_lens[prefills].tolist(), strict=True)),
            longest=longest,
            sizes=tensors[4],
            page_size=page_size,
            total=total,
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
            sizes=torch.zeros(2, dtype=torch.int64, device=device),
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
        sizes = np.array([sum(metadata.seq_lens), max(metadata.seq_lens)], np.int64)
        lens_here, sizes_here = to_device([lens, sizes], plan.seq_lens.device)
        plan.seq_lens.copy_(lens_here)
        plan.sizes.copy_(sizes_here)
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
        kept = self._kept.get(id(layout)) or self._keep(layout)
        key = (
            kept.form, q.stride(), k.stride(), v.stride(), out.stride(), k_cache.stride(),
            v_cache.stride(), len(q), out.dtype,
        )  # fmt: skip
        found = plan.launches.get(key)
        if found is not None:
            launches, shape = found
            partial = q if shape is None else q.new_empty(shape, dtype=torch.float32)
            addresses = kept.addresses(q, k, v, out, k_cache, v_cache, scale, partial)
            if are_aligned(addresses):
                stream = driver.active.get_current_stream(driver.active.get_current_device())
                for launch in launches:
                    launch.repeat(addresses, kept.values, stream)
                return
        layer = Layer(q, k, v, out, scale, k_cache, v_cache, plan, kept)
        done = layer.run(self._blocks, self._splits)
        # A recorded plan runs once per graph, and keeps no memory.
        if done is not None and not plan.fixed:
            plan.launches[key] = done

    def _keep(self, layout: KVLayout) -> Kept:
        if len(self._kept) >= _MOST_LAYOUTS:
            self._kept.clear()
        kept = self._kept[id(layout)] = Kept.of(layout)
        return kept
