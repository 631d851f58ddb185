"""Paged attention by flashinfer: one call per layer for a whole step, planned on the host before
the first layer that needs it.

Shapes as in `kernels.attention`: T tokens, B requests, H query heads, K key/value heads, D head
size, S tokens in a page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from ..attention import AttentionMetadata, KVLayout
from ..paged_attention import TorchAttention, TorchPlan
from ..staging import to_device
from . import latent_attention

_HEAD_SIZES = (64, 128, 256)
# "auto" may choose other kernels for eager steps than for recorded ones.
_DECODE_KERNELS = "fa2"
_LAYOUT = "NHD"  # flashinfer's name for caches of [pages, tokens, heads, head size].
# For parts of split keys in float32: 128 rows for each of two blocks per multiprocessor and each
# query of a key.
_WORKSPACE_BYTES = 384 << 20

# Writes keys and values [T, K, D] to the slots [T] of two caches of a layout.
Store = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, KVLayout], None
]


def obstacle(layout: KVLayout) -> str | None:
    """Return why flashinfer cannot compute a layer's attention, or None if it can."""
    if layout.latent:
        return latent_attention.obstacle(layout)
    if layout.dtype not in latent_attention.DTYPES:
        return (
            "flashinfer computes in bfloat16 and float16, not in "
            f"{str(layout.dtype).removeprefix('torch.')}"
        )
    if layout.cache_dtype == torch.int8:
        return "flashinfer reads keys and values of 16 bits and float8, not int8"
    if not layout.is_plain:
        return "flashinfer is not used for layers with soft caps, sinks or slopes"
    if layout.key_size not in _HEAD_SIZES:
        return (
            f"flashinfer has kernels for heads of {', '.join(map(str, _HEAD_SIZES))}, not of "
            f"{layout.key_size}"
        )
    return None


class _Pages(NamedTuple):
    """The requests of a step for flashinfer, all int32.

    `query_indptr` and `indptr` [B + 1] say where their tokens and pages begin, `last_page_len` [B]
    how full their last page is. `indices` [pages] lies on the device, the others on the host, so
    that planning does not wait.
    """

    query_indptr: torch.Tensor
    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor
    page_size: int

    @property
    def lengths(self) -> torch.Tensor:
        """Tokens of each request, [B]."""
        return (self.indptr.diff() - 1) * self.page_size + self.last_page_len


def _on_tensor_cores(layout: KVLayout) -> bool:
    """Return whether decodes use matrix instructions. The other kernel supports few query heads per
    key head, and does not read keys faster for many.
    """
    return layout.num_heads // layout.num_kv_heads > 3


@dataclass(slots=True)
class FlashInferPlan:
    """The plan of one step.

    Attributes:
        slots: [T].
        decodes: Whether every request has one new token.
        plain: The plan of plain torch, made by the first latent layer that flashinfer cannot
            compute.
    """

    metadata: AttentionMetadata
    slots: torch.Tensor
    pages: _Pages
    decodes: bool
    plain: TorchPlan | None = None


@dataclass(slots=True)
class FlashInferDecodePlan:
    """Decodes whose tensors change in place: `slots` [B] int64; `indptr` [B + 1], `indices` and
    `last_page_len` [B] int32.

    A row without a request has one token in page 0.

    Attributes:
        pages: The last update. None before the first.
        calls: By batch size and layout, made before a graph is captured.
    """

    slots: torch.Tensor
    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor
    page_size: int
    longest: int
    pages: _Pages | None = None
    calls: dict[tuple[int, KVLayout], _Call] = field(default_factory=dict)


Planner = Callable[[Any, KVLayout, _Pages], None]  # Passes the layer and the step to a wrapper.


class _Call:
    """A wrapper of flashinfer, and the step that it is planned for."""

    def __init__(self, wrapper: Any, layout: KVLayout, plan: Planner) -> None:
        self._wrapper, self._layout, self._plan = wrapper, layout, plan
        self._pages: _Pages | None = None
        self._copied: torch.cuda.Event | None = None

    def plan(self, pages: _Pages) -> None:
        """Plan for a step, if that is not done. Must not run while a graph is captured."""
        if self._pages is pages:
            return
        if self._copied is not None:
            # The wrapper has one page-locked buffer for what it copies to the device.
            self._copied.synchronize()
        self._plan(self._wrapper, self._layout, pages)
        if pages.indices.is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
        self._pages = pages

    def run(
        self,
        q: torch.Tensor,
        caches: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        scales: Mapping[str, float],
    ) -> None:
        if self._layout.latent:
            latent_attention.run(self._wrapper, q, caches[0], out)
            return
        self._wrapper.run(q, caches, out=out, **scales)


class FlashInferAttention:
    """flashinfer's paged prefill for steps with prefills or chunks, and its paged decode for all
    others. Latent layers use one kernel for both, and plain torch for steps that it cannot compute.
    """

    head_sizes = _HEAD_SIZES

    def __init__(self, store: Store) -> None:
        self._store, self._plain = store, TorchAttention()
        self._workspace: torch.Tensor | None = None
        self._calls: dict[tuple[bool, KVLayout], _Call] = {}

    def plan(self, metadata: AttentionMetadata, page_size: int) -> FlashInferPlan:
        pages = _pages(metadata, page_size, len(metadata.seq_lens))
        decodes = all(new == 1 for new in metadata.query_lens)
        return FlashInferPlan(metadata, metadata.slot_mapping, pages, decodes)

    def capture_plan(
        self, max_batch_size: int, max_pages: int, page_size: int, device: torch.device
    ) -> FlashInferDecodePlan:
        sizes = (max_batch_size + 1, max_batch_size * max_pages, max_batch_size)
        indptr, indices, last_page_len = (
            torch.zeros(size, dtype=torch.int32, device=device) for size in sizes
        )
        slots = torch.zeros(max_batch_size, dtype=torch.int64, device=device)
        return FlashInferDecodePlan(
            slots, indptr, indices, last_page_len, page_size, max_pages * page_size
        )

    def update_plan(
        self, plan: FlashInferDecodePlan, metadata: AttentionMetadata, batch_size: int
    ) -> None:
        count = len(metadata.seq_lens)
        assert all(length == 1 for length in metadata.query_lens), (
            "a recorded plan takes decodes only"
        )
        assert count <= batch_size <= len(plan.slots) and max(metadata.seq_lens) <= plan.longest, (
            "the step is larger than the plan"
        )
        plan.slots.zero_()
        plan.slots[:count].copy_(metadata.slot_mapping)
        plan.pages = _pages(metadata, plan.page_size, batch_size)
        for (size, _), call in plan.calls.items():
            if size == batch_size:
                call.plan(plan.pages)

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: FlashInferPlan | FlashInferDecodePlan,
        layout: KVLayout,
    ) -> None:
        if (
            layout.latent
            and isinstance(plan, FlashInferPlan)
            and latent_attention.refuses(layout, plan.metadata.query_lens)
        ):
            plan.plain = plan.plain or self._plain.plan(plan.metadata, plan.pages.page_size)
            self._plain.run(q, k, v, out, k_cache, v_cache, plan.plain, layout)
            return
        # Layers that differ only in these scales share a wrapper.
        scales = {"k_scale": layout.k_scale, "v_scale": layout.v_scale}
        scales = {name: scale for name, scale in scales.items() if scale != 1.0}
        shared = replace(layout, k_scale=1.0, v_scale=1.0)
        # A graph pads q, k and v after the tokens of the step. A fixed plan may have more rows than
        # this graph has queries.
        new = min(len(plan.slots), len(q))
        call = (
            self._recorded_call(plan, shared, new)
            if isinstance(plan, FlashInferDecodePlan)
            else self._call(plan, shared, q.device)
        )
        if layout.latent:
            k_cache.flatten(0, 1).index_copy_(0, plan.slots[:new], k[:new])
        else:
            self._store(k[:new], v[:new], k_cache, v_cache, plan.slots[:new], layout)
        call.run(q[:new], (k_cache, v_cache), out[:new], scales)

    def _call(self, plan: FlashInferPlan, layout: KVLayout, device: torch.device) -> _Call:
        call = self._calls.get((plan.decodes, layout))
        if call is None:
            flashinfer, workspace = _library(), self._workspace_on(device)
            how: Planner = _plan_decode if plan.decodes else _plan_prefill
            if layout.latent:
                how = _plan_latent_decode if plan.decodes else _plan_latent
                wrapper = latent_attention.make_wrapper(flashinfer, workspace)
            elif plan.decodes:
                wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                    workspace,
                    _LAYOUT,
                    use_tensor_cores=_on_tensor_cores(layout),
                    backend=_DECODE_KERNELS,
                )
            else:
                wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, _LAYOUT)
            call = self._calls[plan.decodes, layout] = _Call(wrapper, layout, how)
        call.plan(plan.pages)
        return call

    def _recorded_call(self, plan: FlashInferDecodePlan, layout: KVLayout, size: int) -> _Call:
        if plan.pages is None:
            nothing = AttentionMetadata(
                query_lens=[],
                seq_lens=[],
                block_table=plan.indices[None, :0],
                slot_mapping=plan.slots[:0],
            )
            plan.pages = _pages(nothing, plan.page_size, size)
        assert len(plan.pages.last_page_len) == size, "the plan was updated for another batch size"
        call = plan.calls.get((size, layout))
        if call is None:
            how: Planner = _plan_decode
            device = plan.slots.device
            indptr, last = plan.indptr[: size + 1], plan.last_page_len[:size]
            if layout.latent:
                how = _plan_latent_decode
                wrapper = latent_attention.make_wrapper(
                    _library(),
                    self._workspace_on(device),
                    use_cuda_graph=True,
                    qo_indptr=torch.arange(size + 1, dtype=torch.int32, device=device),
                    kv_indptr=indptr,
                    kv_indices=plan.indices,
                    kv_len_arr=last,
                )
            else:
                wrapper = _library().BatchDecodeWithPagedKVCacheWrapper(
                    self._workspace_on(device),
                    _LAYOUT,
                    use_cuda_graph=True,
                    use_tensor_cores=_on_tensor_cores(layout),
                    backend=_DECODE_KERNELS,
                    paged_kv_indptr_buffer=indptr,
                    paged_kv_indices_buffer=plan.indices,
                    paged_kv_last_page_len_buffer=last,
                )
            call = plan.calls[size, layout] = _Call(wrapper, layout, how)
        call.plan(plan.pages)
        return call

    def _workspace_on(self, device: torch.device) -> torch.Tensor:
        """Return one workspace for all wrappers. Their calls run one after another on the
        device.
        """
        if self._workspace is None:
            self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return self._workspace


def _pages(metadata: AttentionMetadata, page_size: int, size: int) -> _Pages:
    """Return the step's requests, padded to `size` with requests of one token in page 0."""
    count, padding = len(metadata.seq_lens), size - len(metadata.seq_lens)
    seq_lens = np.array([*metadata.seq_lens, *[1] * padding], np.int32)
    pages = -(-seq_lens // page_size)
    query_indptr, indptr = np.zeros(size + 1, np.int32), np.zeros(size + 1, np.int32)
    np.cumsum([*metadata.query_lens, *[1] * padding], out=query_indptr[1:])
    pages.cumsum(out=indptr[1:])
    table, total = metadata.block_table, int(indptr[count])
    # Only numbers of requests are sent. Those of pages are made on the device.
    begins = np.arange(count) * table.shape[1] - indptr[:count]
    counts, first = to_device([pages[:count].astype(np.int64), begins], table.device)
    places = torch.repeat_interleave(first, counts, output_size=total)
    places += torch.arange(total, device=table.device)
    indices = F.pad(table.flatten().index_select(0, places).int(), (0, padding))
    last_page_len = (seq_lens - 1) % page_size + 1
    return _Pages(
        torch.from_numpy(query_indptr),
        torch.from_numpy(indptr),
        indices,
        torch.from_numpy(last_page_len),
        page_size,
    )


def _plan_prefill(wrapper: Any, layout: KVLayout, pages: _Pages) -> None:
    _plan_decode(wrapper, layout, pages, pages.query_indptr, causal=True)


def _plan_decode(
    wrapper: Any, layout: KVLayout, pages: _Pages, *queries: torch.Tensor, **options: bool
) -> None:
    """Plan a decode, or a prefill, which has two more arguments: where its queries begin, and
    options.
    """
    wrapper.plan(
        *queries,
        pages.indptr,
        pages.indices,
        pages.last_page_len,
        layout.num_heads,
        layout.num_kv_heads,
        layout.key_size,
        pages.page_size,
        sm_scale=layout.scale,
        window_left=-1 if layout.window is None else layout.window - 1,
        q_data_type=layout.dtype,
        kv_data_type=layout.cache_dtype or layout.dtype,
        **options,
    )


def _plan_latent_decode(wrapper: Any, layout: KVLayout, pages: _Pages) -> None:
    _plan_latent(wrapper, layout, pages, causal=False)


def _plan_latent(wrapper: Any, layout: KVLayout, pages: _Pages, *, causal: bool = True) -> None:
    figures = pages.query_indptr, pages.indptr, pages.indices
    latent_attention.plan(
        _library(), wrapper, layout, figures, pages.lengths, pages.page_size, causal=causal
    )


def _library() -> Any:
    try:
        import flashinfer
    except ImportError as error:
        raise ValueError(
            f"flashinfer cannot be imported ({error}): repair its installation, or use "
            "--attention-backend triton"
        ) from error
    return flashinfer
