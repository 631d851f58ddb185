"""Paged attention by the C++ kernels, as an attention backend.

Shapes as in `kernels.attention`: T tokens, B requests, H query heads, K key/value heads, S tokens
in a page.
"""

from __future__ import annotations

import ctypes
import logging
import subprocess
from dataclasses import dataclass, field
from typing import Any

import torch

from ... import ops
from ...attention import AttentionBackend, AttentionMetadata, KVLayout
from ...cache_format import CACHE_DTYPES
from ...paged_attention import TorchAttention, TorchDecodePlan, TorchPlan
from .build import Kernels, load_kernels

logger = logging.getLogger(__name__)

# The function of the library for each dtype.
FUNCTIONS = {torch.bfloat16: "piecework_attention_bf16", torch.float32: "piecework_attention_f32"}
_POINTERS = (
    *("q", "k", "v", "out", "k_cache", "v_cache", "slots", "table", "query_lens", "seq_lens"),
    *("sinks", "slopes", "numbers", "out_scale"),
)
_STRIDES = ("q_stride", "k_stride", "v_stride", "out_stride", "table_stride")
_NUMBERS = (
    *("requests", "tokens", "heads", "kv_heads", "head_size", "value_size", "page_size"),
    *("window", "group", "skipped", "cache_kind"),
)
# `CacheKind` of attention_cache.h.
CACHE_KINDS = {None: 0, torch.float8_e4m3fn: 1, torch.float8_e5m2: 2, torch.int8: 3}
# The parts of the kernels with other caches than bfloat16's.
_PARTS = {torch.float32: "float32", **{dtype: name for name, dtype in CACHE_DTYPES.items()}}


class AttentionCall(ctypes.Structure):
    """`AttentionCall` of attention.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _STRIDES),
        *((name, ctypes.c_int32) for name in _NUMBERS),
        *((name, ctypes.c_float) for name in ("scale", "k_scale", "v_scale", "softcap")),
    ]


@dataclass(slots=True)
class NativePlan:
    """The plan that the layers of a step share.

    Attributes:
        tensors: The tensors that `call` points to: slots, table, and [2, B] int32 with the new
            tokens and all tokens of each request.
        call: Holds the values of the step. Each layer adds its own.
        torch_plan: Made by the first layer with tensors that the kernels do not support.
    """

    metadata: AttentionMetadata
    page_size: int
    tensors: tuple[torch.Tensor, ...]
    call: AttentionCall
    torch_plan: TorchPlan | None = field(default=None)


class NativeAttention(TorchAttention):
    """One C++ call per layer, which stores keys and values and attends to whole pages in place.

    Threads share requests, heads, blocks of queries, and parts of long contexts. Plain torch
    computes dtypes other than bfloat16 and float32, 8-bit caches with float32 queries, values that
    are neither as long as keys nor their beginnings, and plans of graphs.
    """

    def __init__(self, library: Kernels) -> None:
        self._library = library
        self._functions = {dtype: getattr(library, name) for dtype, name in FUNCTIONS.items()}
        # Whether the kernels have a dtype of the cache.
        self._caches = {torch.bfloat16: True}

    def plan(self, metadata: AttentionMetadata, page_size: int) -> NativePlan:  # type: ignore[override]
        table = metadata.block_table.to(torch.int64).contiguous()
        slots = metadata.slot_mapping.to(torch.int64).contiguous()
        lens = torch.tensor([metadata.query_lens, metadata.seq_lens], dtype=torch.int32)
        call = AttentionCall(
            slots=slots.data_ptr(),
            table=table.data_ptr(),
            query_lens=lens[0].data_ptr(),
            seq_lens=lens[1].data_ptr(),
            table_stride=table.stride(0),
            requests=lens.shape[1],
            tokens=slots.shape[0],
            page_size=page_size,
        )
        return NativePlan(metadata, page_size, (slots, table, lens), call)

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: Any,
        layout: KVLayout,
    ) -> None:
        if self._takes(plan, layout):
            plan.call.out, plan.call.numbers = out.data_ptr(), None
            self._attend(q, k, v, out, k_cache, v_cache, plan, layout)
        else:
            super().run(q, k, v, out, k_cache, v_cache, self._torch_plan(plan), layout)

    def run_quantized(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        scale: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: Any,
        layout: KVLayout,
    ) -> None:
        """See `QuantizedAttention`. The kernels quantise bfloat16 to float8_e4m3fn."""
        if (
            self._takes(plan, layout)
            and layout.dtype == torch.bfloat16
            and out.dtype == torch.float8_e4m3fn
            and (scale.shape, scale.dtype) == ((1,), torch.float32)
        ):
            plan.call.numbers, plan.call.out_scale = out.data_ptr(), scale.data_ptr()
            self._attend(q, k, v, out, k_cache, v_cache, plan, layout)
            return
        result = q.new_empty(out.shape)
        self.run(q, k, v, result, k_cache, v_cache, plan, layout)
        out.copy_(ops.quantize_static(result.flatten(1), scale, out.dtype).view(out.shape))

    def _takes(self, plan: Any, layout: KVLayout) -> bool:
        """Return whether the kernels compute a layer of this step."""
        return (
            layout.dtype in self._functions
            and (layout.cache_dtype is None or layout.dtype == torch.bfloat16)
            and (layout.key_size == layout.value_size or layout.latent)
            and isinstance(plan, NativePlan)
            and self._has_cache(layout.cache_dtype or layout.dtype)
        )

    def _has_cache(self, dtype: torch.dtype) -> bool:
        if (found := self._caches.get(dtype)) is None:
            found = self._caches[dtype] = has_cache(self._library, dtype)
        return found

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: NativePlan,
        layout: KVLayout,
    ) -> None:
        """Call the kernel. The plan's call has the address of `out` already."""
        call = plan.call
        # Heads of a token must be contiguous. Tokens may have any stride, like those of a fused
        # projection.
        side_by_side = (layout.key_size, 1)
        if not q.stride()[1:] == k.stride()[1:] == side_by_side or (
            v.stride()[1:] != side_by_side and not layout.latent
        ):
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        assert out.stride()[1:] == (layout.value_size, 1) and k_cache.is_contiguous()
        assert v_cache.is_contiguous() or layout.latent
        call.q, call.k, call.v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        call.q_stride, call.k_stride, call.v_stride, call.out_stride = (
            q.stride(0),
            k.stride(0),
            v.stride(0),
            out.stride(0),
        )
        call.k_cache, call.v_cache = k_cache.data_ptr(), v_cache.data_ptr()
        call.heads, call.kv_heads = layout.num_heads, layout.num_kv_heads
        call.group, call.skipped = layout.group, layout.skipped_heads
        call.head_size, call.value_size = layout.key_size, layout.value_size
        call.window, call.scale = layout.window or 0, layout.scale
        call.cache_kind = CACHE_KINDS[layout.cache_dtype]
        call.k_scale, call.v_scale = layout.k_scale, layout.v_scale
        call.softcap = layout.softcap or 0.0
        call.sinks = None if layout.sinks is None else layout.sinks.data_ptr()
        call.slopes = None if layout.slopes is None else layout.slopes.data_ptr()
        self._functions[layout.dtype](ctypes.byref(call), torch.get_num_threads())

    def _torch_plan(self, plan: Any) -> TorchPlan | TorchDecodePlan:
        if not isinstance(plan, NativePlan):
            made: TorchPlan | TorchDecodePlan = plan
            return made
        if plan.torch_plan is None:
            plan.torch_plan = super().plan(plan.metadata, plan.page_size)
        return plan.torch_plan


def has_cache(library: Kernels, dtype: torch.dtype) -> bool:
    """Return whether there is attention over a cache of this dtype. It is compiled if needed."""
    if dtype == torch.bfloat16:
        return True
    try:
        library.need(name := _PARTS[dtype])
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("the CPU kernels lack %s caches, plain torch runs instead: %s", name, error)
        return False
    return True


def native_or_torch() -> AttentionBackend:
    """Return the kernels' attention, or plain torch's if there are no kernels."""
    library = load_kernels()
    return TorchAttention() if library is None else NativeAttention(library)
