"""Paged attention by torch_npu's fused kernel, which computes prefills, chunks and decodes of a
step in one call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from ..attention import AttentionMetadata, KVLayout
from ..paged_attention import TorchAttention, TorchDecodePlan, TorchPlan
from . import latent_attention
from .graph import updatable

# Side of the mask that the kernel needs with `sparse_mode` 3 for all lengths (torch_npu's op
# documentation).
_MASK_SIZE = 2048
_CAUSAL_FROM_THE_END = 3
_PAGE_UNIT, _LARGEST_PAGE = 128, 512
# Query heads per key/value head, and numbers of a token's keys in pages [P, S, K * D]: limits of
# the op documentation.
_MOST_HEADS, _WIDEST_TOKEN = 64, 65535


@dataclass(slots=True)
class AscendPlan:
    """The plan of one step. `query_ends` are running totals of the new tokens. The kernel needs
    both lists on the host.
    """

    metadata: AttentionMetadata
    query_ends: list[int]
    page_size: int
    mask: torch.Tensor
    plain: TorchPlan | None = None

    @property
    def longest(self) -> int:
        return max(self.metadata.seq_lens)


@dataclass(slots=True)
class AscendDecodePlan:
    """Decodes whose values change in place: `slots` [B] and `block_table` [B, most] int32 on the
    device, `seq_lens` [B] on the host.

    A row without a request has one token in page 0.

    Attributes:
        latest: The last update.
        plain: The same plan for plain torch, made by the first layer that needs it.
    """

    slots: torch.Tensor
    block_table: torch.Tensor
    seq_lens: list[int]
    page_size: int
    mask: torch.Tensor
    latest: AttentionMetadata | None = None
    plain: TorchDecodePlan | None = None

    def host_arguments(self, batch_size: int) -> Mapping[str, Any]:
        return {"actual_seq_lengths_kv": self.seq_lens[:batch_size]}

    @property
    def longest(self) -> int:
        return self.block_table.shape[1] * self.page_size


class AscendAttention:
    """`npu_fused_infer_attention_score` on pages of 128 to 512 tokens, and plain torch where the
    kernel cannot be used.

    The kernel cannot be used for other page sizes, for layers that it refuses (`obstacle`), and for
    steps that are longer than a layer's sliding window.
    """

    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    # Sizes that CANN checks in layout TND. Queries, keys and values have the same size.
    head_sizes: tuple[int, ...] = (64, 128, 192)
    latent_sizes: tuple[int, int] = latent_attention.SIZES
    latent_heads: tuple[int, ...] = latent_attention.HEADS

    def __init__(self) -> None:
        import torch_npu  # noqa: F401  (registers the ops)

        self._plain = TorchAttention()
        self._mask: torch.Tensor | None = None

    @classmethod
    def obstacle(cls, layout: KVLayout) -> str | None:
        """Return why the kernel refuses such a layer in any step, or None if it supports
        the layer.
        """
        if layout.latent:
            return cls._latent_obstacle(layout)
        if layout.key_size != layout.value_size:
            return (
                f"keys of {layout.key_size} numbers and values of {layout.value_size}, but the "
                "fused kernel needs equal sizes"
            )
        if not layout.is_plain:
            return "soft caps, sinks or slopes, which the fused kernel does not support"
        if layout.key_size not in cls.head_sizes:
            return (
                f"heads of {layout.key_size} numbers, but the fused kernel supports "
                f"{', '.join(map(str, cls.head_sizes))}"
            )
        if layout.dtype not in cls.dtypes:
            return f"{str(layout.dtype).removeprefix('torch.')}, but the fused kernel needs 16 bits"
        if layout.num_heads > _MOST_HEADS * layout.num_kv_heads:
            return (
                f"{layout.num_heads} heads on {layout.num_kv_heads}, but the fused kernel supports "
                f"{_MOST_HEADS} on each"
            )
        if layout.num_kv_heads * layout.key_size > _WIDEST_TOKEN:
            return (
                f"keys of {layout.num_kv_heads} times {layout.key_size} numbers, but the "
                f"fused kernel supports {_WIDEST_TOKEN}"
            )
        return None

    @classmethod
    def _latent_obstacle(cls, layout: KVLayout) -> str | None:
        sizes = layout.value_size, layout.key_size - layout.value_size
        if sizes != cls.latent_sizes or layout.num_heads not in cls.latent_heads:
            heads = ", ".join(map(str, cls.latent_heads))
            return (
                f"{layout.num_heads} heads on latent vectors of {sizes[0]} + {sizes[1]} numbers, "
                f"but the fused kernel supports {heads} on {cls.latent_sizes[0]} + "
                f"{cls.latent_sizes[1]}"
            )
        if layout.dtype not in cls.dtypes or layout.window is not None or not layout.is_plain:
            return (
                "latent vectors in 32 bits, windows or soft caps, which the fused kernel does not "
                "support"
            )
        return None

    def keeps_apart(self, layout: KVLayout, page_size: int) -> bool:
        """Return whether a latent layer's cache holds vectors and rotated keys separately
        (`kernels.latent_attention.KeepsApart`).
        """
        fits = layout.latent and page_size == latent_attention.PAGE_SIZE
        return fits and self.obstacle(layout) is None

    def store_latent(
        self, k: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, layout: KVLayout
    ) -> None:
        latent_attention.store(k, cache, slots.int(), layout)

    def read_latent(
        self, cache: torch.Tensor, pages: torch.Tensor, layout: KVLayout
    ) -> torch.Tensor:
        return latent_attention.read(cache, pages, layout)

    def plan(self, metadata: AttentionMetadata, page_size: int) -> AscendPlan:
        mask = self._mask_on(metadata.slot_mapping.device)
        return AscendPlan(metadata, list(accumulate(metadata.query_lens)), page_size, mask)

    def capture_plan(
        self, max_batch_size: int, max_pages: int, page_size: int, device: torch.device
    ) -> AscendDecodePlan:
        return AscendDecodePlan(
            torch.zeros(max_batch_size, dtype=torch.int32, device=device),
            torch.zeros(max_batch_size, max_pages, dtype=torch.int32, device=device),
            [1] * max_batch_size,
            page_size,
            self._mask_on(device),
        )

    def update_plan(
        self, plan: AscendDecodePlan, metadata: AttentionMetadata, batch_size: int
    ) -> None:
        count, width = (
            len(metadata.seq_lens),
            min(metadata.block_table.shape[1], plan.block_table.shape[1]),
        )
        assert count <= len(plan.seq_lens) and max(metadata.seq_lens) <= plan.longest, (
            "the step is larger than the plan"
        )
        plan.seq_lens = [*metadata.seq_lens, *[1] * (len(plan.seq_lens) - count)]
        plan.slots.zero_()
        plan.slots[:count].copy_(metadata.slot_mapping)
        plan.block_table.zero_()
        plan.block_table[:count, :width].copy_(metadata.block_table[:, :width])
        plan.latest = metadata
        if plan.plain is not None:
            self._plain.update_plan(plan.plain, metadata, batch_size)

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: AscendPlan | AscendDecodePlan,
        layout: KVLayout,
    ) -> None:
        if self.keeps_apart(layout, plan.page_size):
            self._run_latent(q, k, out, k_cache, plan, layout)
            return
        if not self._is_fused(layout, plan):
            self._plain.run(q, k, v, out, k_cache, v_cache, self._plain_plan(plan), layout)
            return
        if isinstance(plan, AscendDecodePlan):
            plan = _first(plan, q.shape[0])
        # A graph pads q, k and v, but the kernel needs exactly the rows that the lengths give.
        new = plan.query_ends[-1]
        torch.ops.atb._npu_reshape_and_cache(
            k[:new], v[:new], k_cache, v_cache, plan.metadata.slot_mapping
        )
        with updatable():
            result, _ = torch.ops.npu.npu_fused_infer_attention_score(
                q[:new],
                k_cache.flatten(2),
                v_cache.flatten(2),
                atten_mask=plan.mask,
                actual_seq_lengths=plan.query_ends,
                actual_seq_lengths_kv=plan.metadata.seq_lens,
                block_table=plan.metadata.block_table,
                num_heads=layout.num_heads,
                num_key_value_heads=layout.num_kv_heads,
                input_layout="TND",
                block_size=plan.page_size,
                scale=layout.scale,
                sparse_mode=_CAUSAL_FROM_THE_END,
            )
        out[:new].copy_(result)

    def _run_latent(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        out: torch.Tensor,
        cache: torch.Tensor,
        plan: AscendPlan | AscendDecodePlan,
        layout: KVLayout,
    ) -> None:
        if isinstance(plan, AscendDecodePlan):
            plan = _first(plan, q.shape[0])
        metadata, new = plan.metadata, plan.query_ends[-1]
        latent_attention.store(k[:new], cache, metadata.slot_mapping, layout)
        if new == len(metadata.query_lens):
            attended = latent_attention.run_decodes(q[:new], cache, metadata, layout)
            out[:new].copy_(attended)
        else:
            latent_attention.run_plainly(q, k, out, cache, metadata, layout)

    def _mask_on(self, device: torch.device) -> torch.Tensor:
        if self._mask is None:
            self._mask = torch.ones(_MASK_SIZE, _MASK_SIZE, dtype=torch.bool).triu(1).to(device)
        return self._mask

    def _is_fused(self, layout: KVLayout, plan: AscendPlan | AscendDecodePlan) -> bool:
        return (
            plan.page_size % _PAGE_UNIT == 0
            and plan.page_size <= _LARGEST_PAGE
            and not layout.latent
            and self.obstacle(layout) is None
            and (layout.window is None or plan.longest <= layout.window)
        )

    def _plain_plan(self, plan: AscendPlan | AscendDecodePlan) -> Any:
        if plan.plain is None and isinstance(plan, AscendDecodePlan):
            assert plan.latest is not None, "update the plan before a run, and run before a capture"
            rows, pages = plan.block_table.shape
            plan.plain = self._plain.capture_plan(
                rows, pages, plan.page_size, plan.block_table.device
            )
            self._plain.update_plan(plan.plain, plan.latest, rows)
        elif isinstance(plan, AscendPlan) and plan.plain is None:
            # Torch needs 64-bit indices.
            metadata = replace(
                plan.metadata,
                slot_mapping=plan.metadata.slot_mapping.long(),
                block_table=plan.metadata.block_table.long(),
            )
            plan.plain = self._plain.plan(metadata, plan.page_size)
        return plan.plain


def _first(plan: AscendDecodePlan, count: int) -> AscendPlan:
    """Return the plan of the first `count` rows. Its tensors are views, its lengths are the current
    ones.
    """
    ends = list(range(1, count + 1))
    metadata = AttentionMetadata(
        query_lens=[1] * count,
        seq_lens=plan.seq_lens[:count],
        block_table=plan.block_table[:count],
        slot_mapping=plan.slots[:count],
    )
    return AscendPlan(metadata, ends, plan.page_size, plan.mask)
