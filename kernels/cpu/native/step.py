"""Decode steps of a decoder in one native call: the model's own weights, read where they lie.

T tokens, B requests, N hidden size.
"""

from __future__ import annotations

import ctypes
import operator
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
from .build import load_kernels
from .linear import PANEL, SCALED_COLUMNS, Layout, LinearStruct
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
_LEAST_SUM = 1e-20
"""`kLeastSum` of moe.cpp."""


class NativeStep:
    """The forward of small steps of a model whose weights are packed. The model and the cache must
    outlive it unmoved.

    `k_cache`, `v_cache`: one tensor [P, S, K, D] a layer, as `layouts` has it, or in 8 bits.
    `second`: whether a layer's pages are those of `AttentionMetadata.window`, for each; none is.
    `group`: of a model that is split. Every rank must make the same steps.
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
        self._last: _Call | None = None
        self._group = group
        parts: DecoderParts = part_of(model)
        self._has_head = group is None and parts.head is not None and _is_packed(parts.head)
        self._finish = parts.finish
        tables = [tuple(table.contiguous() for table in both) for both in parts.tables]
        # What the kernels read, beside the parts that are made anew each time.
        self._owners = (model, parts, tables, layouts, k_cache, v_cache)
        layers = [
            layer_struct(*each, tables)
            for each in zip(parts.layers, layouts, k_cache, v_cache, strict=True)
        ]
        for layer, is_second in zip(layers, second, strict=False):
            layer.table = int(is_second)
        self._layers = (LayerStruct * len(layers))(*layers)
        self._hidden = parts.embedding.hidden_size
        first = layouts[0]
        if group is not None:
            assert parts.first_token == group.rank * parts.embedding.num_rows
            self.max_tokens = min(self.max_tokens, SLOT_BYTES // (2 * self._hidden))
        self._model = ModelStruct(
            *(ctypes.addressof(self._layers), table_of(parts.embedding), norm_struct(parts.norm)),
            linear_of(parts.head) if self._has_head else LinearStruct(),
            None if group is None else group.member,
            *(len(layers), self._hidden),
            max((_width(each) for layer in parts.layers for each in _dense(layer)), default=0),
            *(first.num_heads, first.num_kv_heads, first.key_size),
            page_size_of(k_cache[0], first.num_kv_heads, first.key_size),
            *(first.group, first.skipped_heads),
            parts.embedding_scale,
        )

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """input_ids, positions [T] int64, T up to `max_tokens`, to hidden states [T, N]; keys and
        values go to their slots.
        """
        out = torch.empty(input_ids.shape[0], self._hidden, dtype=torch.bfloat16)
        call = self._call(input_ids, positions, metadata, None)
        call.write_hidden(out)
        self._run(call)
        return out

    def choose(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        rows: torch.Tensor,
        draws: npt.NDArray[np.void] | None = None,
    ) -> list[int] | None:
        """Tokens [N] behind `rows` [N] int64 of the step instead, -1 of logits that are not finite:
        as `draws` [N] tell, of `DRAW`, or else the likeliest. None, and nothing done, where the
        head is not the kernels', or more is done to its logits.
        """
        if not self._has_head or self._finish is not None:
            return None
        call = self._call(input_ids, positions, metadata, rows)
        call.draw_by(draws, self._model.head.rows)
        self._run(call)
        return list(call.chosen)

    def logits(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        rows: torch.Tensor,
    ) -> torch.Tensor | None:
        """Logits [N, V] float32 of those rows; None, and nothing done, where the head is not the
        kernels'.
        """
        if not self._has_head:
            return None
        logits = torch.empty(len(rows), self._model.head.rows, dtype=torch.float32)
        call = self._call(input_ids, positions, metadata, rows)
        call.write_logits(logits)
        self._run(call)
        return logits if self._finish is None else self._finish(logits)

    def forget(self) -> None:
        """Nothing of the step before is kept: its requests' logits may be large."""
        self._last = None

    def _call(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        rows: torch.Tensor | None,
    ) -> _Call:
        given = (input_ids, positions, metadata, rows)
        if self._last is None or not self._last.is_of(given):
            self._last = _Call(self._model, *given)
        return self._last

    def _run(self, call: _Call) -> None:
        succeeded = self._step(call.reference, call.threads)
        if self._group is not None:
            self._group.check(succeeded)


class _Call:
    """What the kernels read of a step: addresses, so that a step in the same tensors, of which the
    kernels read what they hold then, is the same call.
    """

    def __init__(
        self,
        model: ModelStruct,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        rows: torch.Tensor | None,
    ) -> None:
        self._given = (input_ids, positions, metadata, rows)
        both = [each for each in (metadata, metadata.window) if each is not None]
        given = [
            *(input_ids, positions),
            *(each.slot_mapping for each in both),
            *(each.block_table for each in both),
        ]
        read = [each.to(torch.int64).contiguous() for each in given]
        self._is_copied = any(one is not other for one, other in zip(given, read, strict=True))
        ids, places, *others = read
        slots, tables = others[: len(both)], others[len(both) :]
        count, samples = len(metadata.query_lens), 0 if rows is None else len(rows)
        lens = (ctypes.c_int32 * count)(*metadata.query_lens)
        self.chosen = (ctypes.c_int64 * samples)()
        self._owners: list[Any] = [model, read, lens]
        self._logits: torch.Tensor | None = None
        self._draws: npt.NDArray[np.void] | None = None
        self._step = StepStruct(
            ctypes.addressof(model),
            *(ids.data_ptr(), places.data_ptr()),
            *(_BOTH(*(part.data_ptr() for part in parts)) for parts in (slots, tables)),
            *(ctypes.addressof(lens), None, None if rows is None else rows.data_ptr()),
            *(None, None, None),
            *(tables[0].stride(0), count, ids.shape[0], samples),
        )
        self.reference = ctypes.byref(self._step)
        self.threads = torch.get_num_threads()

    def is_of(self, given: tuple[Any, ...]) -> bool:
        """Whether a step in these tensors would be read from the same memory."""
        return not self._is_copied and all(map(operator.is_, self._given, given))

    def write_hidden(self, out: torch.Tensor) -> None:
        """[T, N] bfloat16."""
        self._step.out = out.data_ptr()

    def write_logits(self, logits: torch.Tensor) -> None:
        """[N, V] float32."""
        self._step.logits, self._step.chosen, self._step.draws = logits.data_ptr(), None, None

    def draw_by(self, draws: npt.NDArray[np.void] | None, vocab: int) -> None:
        """To `chosen`, by `draws` [N], or else the likeliest."""
        if self._step.chosen is not None and draws is self._draws:
            return
        self._draws = draws
        self._step.chosen = ctypes.addressof(self.chosen)
        self._step.logits = self._step.draws = None
        if draws is not None:
            # Where their logits are worked in.
            self._logits = torch.empty(len(self.chosen), vocab, dtype=torch.float32)
            self._step.logits, self._step.draws = self._logits.data_ptr(), draws.ctypes.data


def make_native_step(
    model: nn.Module,
    layouts: Sequence[KVLayout],
    k_cache: Sequence[torch.Tensor],
    v_cache: Sequence[torch.Tensor],
    second: Sequence[bool] = (),
) -> NativeStep | None:
    """None for what the kernels do not know: weights that are not packed, layers of another kind,
    ranks that share no memory, no kernels.
    """
    library = load_kernels()
    if library is None or not is_known(model, layouts):
        return None
    if not part_of(model).layers[0].attention.output.is_split:
        return NativeStep(library, model, layouts, k_cache, v_cache, second=second)
    group = get_group(TENSOR_PARALLEL)
    if not isinstance(group, SharedMemoryGroup):
        return None
    return NativeStep(library, model, layouts, k_cache, v_cache, group, second)


def is_known(model: Any, layouts: Sequence[KVLayout]) -> bool:
    """Whether it is a decoder of described parts with packed weights, in bfloat16, whose gates and
    ups lie in panels of their own, and whose layers have the same heads.
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
    others = [
        tensor
        for tensor in (*model.parameters(), *model.buffers())
        if tensor.is_floating_point() and id(tensor) not in packed | corrections
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
    """What all tokens go through."""
    part = layer.feed_forward
    dense = part.shared if isinstance(part, MixtureParts) else part
    return [] if dense is None else [dense]


def _width(part: FeedForwardParts) -> int:
    return int(part.down.in_features)


def _knows_feed_forward(layer: LayerParts) -> bool:
    """Whether gates and ups lie in panels of their own, and experts are chosen as the kernels do
    it. Ranks make one sum of what experts and the others give, which no kernel does.
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
    """In a layout whose products take x as the layer makes it."""
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
