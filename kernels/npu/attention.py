"""Paged attention by torch_npu's fused kernel, which takes prefills, chunks and decodes of one step in one call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from ..attention import AttentionMetadata
from ..paged_attention import TorchAttention, TorchPlan

_MASK_SIZE = 2048
"""Side of the mask that the kernel wants with `sparse_mode` 3, whatever the lengths are (torch_npu's op documentation)."""
_CAUSAL_FROM_THE_END = 3
_PAGE_UNIT, _LARGEST_PAGE = 128, 512


@dataclass(slots=True)
class AscendPlan:
    """`query_ends`: running totals of the new tokens; both lists live on the host, as the kernel wants them."""

    metadata: AttentionMetadata
    query_ends: list[int]
    page_size: int
    mask: torch.Tensor
    plain: TorchPlan | None = None


class AscendAttention:
    """`npu_fused_infer_attention_score` on pages of 128 to 512 tokens in 16 bits; plain torch where the kernel does not reach.

    That is: other page sizes and dtypes, and steps that are longer than a layer's sliding window.
    """

    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)

    def __init__(self) -> None:
        import torch_npu  # noqa: F401  (registers the ops)

        self._plain = TorchAttention()
        self._mask: torch.Tensor | None = None

    def plan(self, metadata: AttentionMetadata, page_size: int) -> AscendPlan:
        if self._mask is None:
            mask = torch.ones(_MASK_SIZE, _MASK_SIZE, dtype=torch.bool).triu(1)
            self._mask = mask.to(metadata.slot_mapping.device)
        return AscendPlan(metadata, list(accumulate(metadata.query_lens)), page_size, self._mask)

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: AscendPlan,
        *,
        scale: float,
        window: int | None,
    ) -> None:
        if not self._is_fused(q, plan, window):
            self._plain.run(q, k, v, out, k_cache, v_cache, self._plain_plan(plan), scale=scale, window=window)
            return
        # A graph pads q, k and v; the kernel wants as many rows as the lengths say.
        new = plan.query_ends[-1]
        torch.ops.atb._npu_reshape_and_cache(k[:new], v[:new], k_cache, v_cache, plan.metadata.slot_mapping)
        result, _ = torch.ops.npu.npu_fused_infer_attention_score(
            q[:new],
            k_cache.flatten(2),
            v_cache.flatten(2),
            atten_mask=plan.mask,
            actual_seq_lengths=plan.query_ends,
            actual_seq_lengths_kv=plan.metadata.seq_lens,
            block_table=plan.metadata.block_table,
            num_heads=q.shape[1],
            num_key_value_heads=k.shape[1],
            input_layout="TND",
            block_size=plan.page_size,
            scale=scale,
            sparse_mode=_CAUSAL_FROM_THE_END,
        )
        out[:new].copy_(result)

    def _is_fused(self, q: torch.Tensor, plan: AscendPlan, window: int | None) -> bool:
        fits = plan.page_size % _PAGE_UNIT == 0 and plan.page_size <= _LARGEST_PAGE and q.dtype in self.dtypes
        return fits and (window is None or max(plan.metadata.seq_lens) <= window)

    def _plain_plan(self, plan: AscendPlan) -> Any:
        if plan.plain is None:
            # Torch indexes with 64 bits.
            metadata = replace(plan.metadata, slot_mapping=plan.metadata.slot_mapping.long(), block_table=plan.metadata.block_table.long())
            plan.plain = self._plain.plan(metadata, plan.page_size)
        return plan.plain
