"""Decode steps of a decoder in one native call, which reads the model's weights in place.

T tokens, B requests, N hidden size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ...attention import AttentionMetadata, KVLayout
from ...cache_format import page_size_of
from ...collectives import TENSOR_PARALLEL, get_group
from ...step_parts import (
    DecoderParts,
    FeedForwardParts,
    LayerParts,
    MixtureParts,
    NoParts,
    part_of,
)
from .attention import has_cache
from .build import load_kernels
from .linear import PANEL, SCALED_COLUMNS
from .linear_struct import Layout, LinearStruct
from .shared import SLOT_BYTES, SharedMemoryGroup
from .step_structs import (
    ACTIVATIONS,
    LayerStruct,
    ModelStruct,
    StepStruct,
    layer_struct,
    linear_of,
    norm_struct,
    order_of,
    table_of,
)

_BOTH = ctypes.c_void_p * 2
_LEAST_SUM = 1e-20  # `kLeastSum` of moe.cpp.


class NativeStep:
    """The forward of small steps of a model with packed weights. The model and the cache must
    outlive it and stay at their addresses.

    `k_cache` and `v_cache` have a tensor [P, S, K, D] per layer, as in `layouts`, or its 8-bit
    form. `second` tells for each layer whether its pages are those of `AttentionMetadata.window`;
    empty: none. `group` is that of a split model, whose ranks must all run the same steps.
    """

    max_tokens = 64

    def __init__(
        self,
        library: ctypes.CDLL,
        model: Any,
        layouts: Sequence[KVLayout],
        k_cache: Sequence[torch.Tensor],
        v_cache: Sequence[torch.Tensor],
        group: SharedMemoryGroup | None = None,
        second: Sequence[bool] = (),
    ) -> None:
        self._step = library.piecework_step
        self._group = group
        parts: DecoderParts = part_of(model)
        self.has_head = group is None and parts.head is not None and _is_packed(parts.head)
        self.finish = parts.finish
        # Other activations are computed by torch in the ops, and other layers sum in another order.
        self.keeps_bits = group is None and all(
            isinstance(each.feed_forward, FeedForwardParts)
            and each.feed_forward.activation == "silu"
            for each in parts.layers
        )
        tables = [tuple(table.contiguous() for table in both) for both in parts.tables]
        # Keep alive what the kernels read.
        self._owners = (model, parts, tables, layouts, k_cache, v_cache)
        layers = [
            layer_struct(*each, tables)
            for each in zip(parts.layers, layouts, k_cache, v_cache, strict=True)
        ]
        for layer, is_second in zip(layers, second, strict=False):
            layer.table = int(is_second)
        for place, number in enumerate(parts.kept_layers, 1):
            if number < len(layers):
                layers[number].kept = place
        self._layers = (LayerStruct * len(layers))(*layers)
        self._hidden = parts.embedding.hidden_size
        first = layouts[0]
        if group is not None:
            assert parts.first_token == group.rank * parts.embedding.num_rows
            self.max_tokens = min(self.max_tokens, SLOT_BYTES // (2 * self._hidden))
        self.model = ModelStruct(
            *(ctypes.addressof(self._layers), table_of(parts.embedding), norm_struct(parts.norm)),
            linear_of(parts.head) if self.has_head else LinearStruct(),
            None if group is None else group.member,
            *(len(layers), self._hidden),
            max((_width(each) for layer in parts.layers for each in _dense(layer)), default=0),
            *(first.num_heads, first.num_kv_heads, first.key_size),
            page_size_of(k_cache[0], first.num_kv_heads, first.key_size),
            *(first.group, first.skipped_heads, len(parts.kept_layers)),
            len(layers) in parts.kept_layers,
            parts.embedding_scale,
        )

    def call(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        rows: torch.Tensor | None = None,
        draws: npt.NDArray[np.void] | None = None,
        adapters: torch.Tensor | None = None,
        turns: torch.Tensor | None = None,
    ) -> NativeCall:
        """See `StepKernels`. Tensors must be int64, and those of adapters int32."""
        return NativeCall(self, input_ids, positions, metadata, rows, draws, adapters, turns)

    def run(self, step: Any, threads: int) -> None:
        """Run a step. `step` is a reference to a `StepStruct` of this model."""
        succeeded = self._step(step, threads)
        if self._group is not None:
            self._group.check(succeeded)


class NativeCall:
    """The addresses of the tensors of one step, and of later steps in the same tensors."""

    def __init__(
        self,
        kernels: NativeStep,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        rows: torch.Tensor | None,
        draws: npt.NDArray[np.void] | None,
        adapters: torch.Tensor | None = None,
        turns: torch.Tensor | None = None,
    ) -> None:
        both = [each for each in (metadata, metadata.window) if each is not None]
        slots, tables = [each.slot_mapping for each in both], [each.block_table for each in both]
        rows = input_ids[:0] if rows is None else rows
        turns = positions if turns is None else turns
        read = [input_ids, positions, turns, *slots, *tables, rows]
        assert all(each.dtype == torch.int64 and each.is_contiguous() for each in read)
        self._kernels, self._num_tokens, self._num_rows = kernels, len(input_ids), len(rows)
        count = len(metadata.query_lens)
        lens = (ctypes.c_int32 * count)(*metadata.query_lens)
        self._chosen = (ctypes.c_int64 * self._num_rows)()
        self._step = StepStruct(
            ctypes.addressof(kernels.model),
            *(input_ids.data_ptr(), positions.data_ptr(), turns.data_ptr()),
            *(_BOTH(*(part.data_ptr() for part in parts)) for parts in (slots, tables)),
            *(ctypes.addressof(lens), None, rows.data_ptr()),
            *(None, None, None, None if adapters is None else adapters.data_ptr()),
            *(tables[0].stride(0), count, self._num_tokens, 0),
        )
        self._reference, self._threads = ctypes.byref(self._step), torch.get_num_threads()
        self._to_tokens = {"samples": self._num_rows, "chosen": ctypes.addressof(self._chosen)}
        self._owners = [read, lens, draws, adapters]
        if draws is not None and kernels.has_head and kernels.finish is None:
            # Memory in which their logits are computed.
            logits = self._empty_logits()
            self._to_tokens |= {"logits": logits.data_ptr(), "draws": draws.ctypes.data}
            self._owners.append(logits)

    def hidden(self) -> torch.Tensor:
        """See `StepCall`. The states are bfloat16."""
        columns = self._kernels.model.hidden * (1 + self._kernels.model.states)
        out = torch.empty(self._num_tokens, columns, dtype=torch.bfloat16)
        self._compute(out=out.data_ptr())
        return out

    def logits(self) -> torch.Tensor | None:
        """See `StepCall`."""
        if not self._kernels.has_head:
            return None
        logits, finish = self._empty_logits(), self._kernels.finish
        self._compute(samples=self._num_rows, logits=logits.data_ptr())
        return logits if finish is None else finish(logits)

    def tokens(self) -> list[int] | None:
        """See `StepCall`. Also None if the model changes its logits afterwards."""
        if not self._kernels.has_head or self._kernels.finish is not None:
            return None
        self._compute(**self._to_tokens)
        return list(self._chosen)

    def _compute(
        self,
        samples: int = 0,
        out: int | None = None,
        chosen: int | None = None,
        logits: int | None = None,
        draws: int | None = None,
    ) -> None:
        step = self._step
        step.samples, step.out, step.chosen = samples, out, chosen
        step.logits, step.draws = logits, draws
        self._kernels.run(self._reference, self._threads)

    def _empty_logits(self) -> torch.Tensor:
        return torch.empty(self._num_rows, self._kernels.model.head.rows, dtype=torch.float32)


def make_native_step(
    model: nn.Module,
    layouts: Sequence[KVLayout],
    k_cache: Sequence[torch.Tensor],
    v_cache: Sequence[torch.Tensor],
    second: Sequence[bool] = (),
) -> NativeStep | None:
    """Return the kernels, or None if they do not support the model: weights that are not packed,
    other layers, ranks without shared memory, or no library.
    """
    library = load_kernels()
    if library is None or not is_known(model, layouts):
        return None
    if not all(has_cache(library, each.cache_dtype or each.dtype) for each in layouts):
        return None
    if not part_of(model).layers[0].attention.output.is_split:
        return NativeStep(library, model, layouts, k_cache, v_cache, second=second)
    group = get_group(TENSOR_PARALLEL)
    if not isinstance(group, SharedMemoryGroup):
        return None
    return NativeStep(library, model, layouts, k_cache, v_cache, group, second)


def is_known(model: Any, layouts: Sequence[KVLayout]) -> bool:
    """Return whether the model is a bfloat16 decoder of described parts with packed weights. Gates
    and ups must be in panels of their own, and all layers must have the same heads.
    """
    try:
        parts: DecoderParts = part_of(model)
    except NoParts:
        return False
    heads = {
        (each.num_heads, each.num_kv_heads, each.key_size, each.value_size, each.dtype)
        for each in layouts
    }
    if len(heads) != 1 or len(layouts) != len(parts.layers):
        return False
    _, _, key_size, value_size, dtype = next(iter(heads))
    linears = [part for layer in parts.layers for part in _linears_of(layer)]
    packed = {
        id(tensor)
        for linear in (*linears, model.lm_head)
        for tensor in (
            *(linear.weight, order_of(linear)),
            *(linear.input.parameters() if linear.input else ()),
        )
    }
    corrections = {
        id(layer.feed_forward.router.e_score_correction_bias)
        for layer in parts.layers
        if isinstance(layer.feed_forward, MixtureParts)
    }
    of_adapters = {
        id(tensor)
        for module in model.modules()
        if (adapters := getattr(module, "adapters", None)) is not None
        for tensor in adapters.buffers()
    }
    others = [
        tensor
        for tensor in (*model.parameters(), *model.buffers())
        if tensor.is_floating_point() and id(tensor) not in packed | corrections | of_adapters
    ]
    return (
        all(_is_packed(linear) for linear in linears)
        and all(
            tensor.dtype == torch.bfloat16
            and tensor.is_contiguous()
            and tensor.device.type == "cpu"
            for tensor in others
        )
        and (key_size, dtype) == (value_size, torch.bfloat16)
        and key_size % 2 == 0
        and not any(each.chunked or each.latent for each in layouts)
        and all(map(_knows_feed_forward, parts.layers))
    )


def _linears_of(layer: LayerParts) -> list[Any]:
    found = [layer.attention.qkv, layer.attention.output]
    mixture = layer.feed_forward
    if isinstance(mixture, MixtureParts):
        found += [mixture.experts.gate_up_proj, mixture.experts.down_proj, mixture.router]
        if mixture.shared_gate is not None:
            found.append(mixture.shared_gate)
    return found + [linear for each in _dense(layer) for linear in (each.gate_up, each.down)]


def _dense(layer: LayerParts) -> list[FeedForwardParts]:
    """Return the feed-forward layers that all tokens pass through."""
    part = layer.feed_forward
    dense = part.shared if isinstance(part, MixtureParts) else part
    return [] if dense is None else [dense]


def _width(part: FeedForwardParts) -> int:
    return int(part.down.in_features)


def _knows_feed_forward(layer: LayerParts) -> bool:
    """Return whether gates and ups are in panels of their own, and the kernels can choose the
    experts.

    Ranks sum experts and the shared layer at once, which no kernel does.
    """
    part = layer.feed_forward
    dense = _dense(layer)
    if any(_width(each) % PANEL or each.activation not in ACTIVATIONS for each in dense):
        return False
    return not isinstance(part, MixtureParts) or (
        part.router.routing.num_groups == 1
        and part.router.routing.least_sum == _LEAST_SUM
        and order_of(part.experts.gate_up_proj) is None
        and not (part.shared is not None and layer.attention.output.is_split)
    )


def _is_packed(linear: Any) -> bool:
    """Return whether the weight is packed, in a layout whose products take x as the layer
    makes it.
    """
    if linear.layout is None or linear.input is None:
        return linear.layout not in (None, Layout.INT8)
    dtype = torch.int8 if linear.layout == Layout.INT8 else torch.float8_e4m3fn
    group = linear.input.group or linear.in_features
    return (
        linear.layout >= Layout.INT8
        and linear.input.dtype == dtype
        and group in (linear.in_features, SCALED_COLUMNS)
        and linear.in_features % group == 0
    )
