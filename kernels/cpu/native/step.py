"""Decode steps of a decoder in one native call: the model's own weights, read where they lie.

T tokens, B requests, N hidden size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

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
    NormParts,
    part_of,
)
from .attention import CACHE_KINDS
from .build import load_kernels
from .linear import PANEL, SCALED_COLUMNS, Layout, LinearStruct, linear_struct
from .moe import ExpertsStruct
from .shared import SLOT_BYTES, SharedMemoryGroup

_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
_ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1}


class _Norm(ctypes.Structure):
    _fields_ = [("weight", _POINTER), ("eps", _FLOAT), ("spans_heads", _INT)]


class _FeedForward(ctypes.Structure):
    _fields_ = [("gate_up", LinearStruct), ("down", LinearStruct), ("activation", _INT)]


class _Routing(ctypes.Structure):
    _fields_ = [
        *(("router", LinearStruct), ("correction", _POINTER)),
        *((name, _INT) for name in ("top_k", "is_sigmoid", "is_renormalized", "first")),
        ("scale", _FLOAT),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        *(
            (name, _Norm)
            for name in (
                "before_attention",
                "after_attention",
                "before_feed_forward",
                "after_feed_forward",
                "q_norm",
                "k_norm",
            )
        ),
        *(("qkv", LinearStruct), ("output", LinearStruct), ("dense", _FeedForward)),
        *(("routing", _Routing), ("experts", ExpertsStruct)),
        *(("shared", _FeedForward), ("shared_gate", LinearStruct)),
        *((name, _POINTER) for name in ("cos", "signed_sin", "sinks", "k_cache", "v_cache")),
        *((name, _FLOAT) for name in ("multiplier", "scale", "softcap", "k_scale", "v_scale")),
        *((name, _INT) for name in ("turned", "is_interleaved", "window", "cache_kind")),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        *(("layers", _POINTER), ("embedding", _POINTER), ("norm", _Norm), ("member", _POINTER)),
        *(
            (name, _INT)
            for name in (
                "embedded",
                "num_layers",
                "hidden",
                "intermediate",
                "heads",
                "kv_heads",
                "head_size",
                "page_size",
                "group",
                "skipped",
            )
        ),
        ("embedding_scale", _FLOAT),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *(
            (name, _POINTER)
            for name in (
                "model",
                "ids",
                "positions",
                "slots",
                "table",
                "query_lens",
                "seq_lens",
                "out",
            )
        ),
        *(("table_stride", _LONG), ("requests", _INT), ("tokens", _INT)),
    ]


class NativeStep:
    """The forward of small steps of a model whose weights are packed. The model and the cache must
    outlive it unmoved.

    `k_cache`, `v_cache`: one tensor [P, S, K, D] a layer, as `layouts` has it, or in 8 bits.
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
    ) -> None:
        self._step = library.piecework_step
        self._group = group
        parts: DecoderParts = part_of(model)
        tables = [tuple(table.contiguous() for table in both) for both in parts.tables]
        # What the kernels read, beside the parts that are made anew each time.
        self._owners = (model, parts, tables, layouts, k_cache, v_cache)
        layers = [
            _layer(*each, tables)
            for each in zip(parts.layers, layouts, k_cache, v_cache, strict=True)
        ]
        self._layers = (_Layer * len(layers))(*layers)
        self._hidden = parts.embedding.shape[1]
        first = layouts[0]
        embedded = len(parts.embedding)
        if group is not None:
            assert parts.first_token == group.rank * embedded
            self.max_tokens = min(self.max_tokens, SLOT_BYTES // (2 * self._hidden))
        self._model = _Model(
            *(ctypes.addressof(self._layers), parts.embedding.data_ptr(), _norm(parts.norm)),
            None if group is None else group.member,
            *(embedded, len(layers), self._hidden),
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
        # Names keep what is copied here until the step is done.
        ids, places = input_ids.contiguous(), positions.contiguous()
        table, slots = (
            metadata.block_table.to(torch.int64).contiguous(),
            metadata.slot_mapping.to(torch.int64).contiguous(),
        )
        lens = torch.tensor([metadata.query_lens, metadata.seq_lens], dtype=torch.int32)
        step = _Step(
            ctypes.addressof(self._model),
            *(part.data_ptr() for part in (ids, places, slots, table, lens[0], lens[1], out)),
            *(table.stride(0), lens.shape[1], out.shape[0]),
        )
        succeeded = self._step(ctypes.byref(step), torch.get_num_threads())
        if self._group is not None:
            self._group.check(succeeded)
        return out


def make_native_step(
    model: nn.Module,
    layouts: Sequence[KVLayout],
    k_cache: Sequence[torch.Tensor],
    v_cache: Sequence[torch.Tensor],
) -> NativeStep | None:
    """None for what the kernels do not know: weights that are not packed, layers of another kind,
    ranks that share no memory, no kernels.
    """
    library = load_kernels()
    if library is None or not is_known(model, layouts):
        return None
    if not part_of(model).layers[0].attention.output.is_split:
        return NativeStep(library, model, layouts, k_cache, v_cache)
    group = get_group(TENSOR_PARALLEL)
    if not isinstance(group, SharedMemoryGroup):
        return None
    return NativeStep(library, model, layouts, k_cache, v_cache, group)


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
            *(linear.weight, _order_of(linear)),
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
    it. Ranks sum what experts give and what the others do apart.
    """
    part = layer.feed_forward
    dense = _dense(layer)
    if any(_width(each) % PANEL or each.activation not in _ACTIVATIONS for each in dense):
        return False
    return not isinstance(part, MixtureParts) or (
        part.router.routing.num_groups == 1
        and _order_of(part.experts.gate_up_proj) is None
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


def _linear(part: Any) -> LinearStruct:
    made = part.input
    scale, group = (None, 0) if made is None else (made.scale, made.group or part.in_features)
    shape = part.in_features, part.out_features, part.layout
    return linear_struct(part.weight, part.bias, *shape, scale, group, _order_of(part))


def _order_of(part: Any) -> torch.Tensor | None:
    """Of its input's columns, where that is not theirs."""
    order: torch.Tensor | None = getattr(part, "input_order", None)
    return order


def _norm(part: NormParts | None) -> _Norm:
    return _Norm() if part is None else _Norm(part.weight.data_ptr(), part.eps, part.spans_heads)


def _feed_forward(part: FeedForwardParts | None) -> _FeedForward:
    if part is None:
        return _FeedForward()
    return _FeedForward(_linear(part.gate_up), _linear(part.down), _ACTIVATIONS[part.activation])


def _layer(
    layer: LayerParts,
    layout: KVLayout,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tables: Sequence[Sequence[torch.Tensor]],
) -> _Layer:
    attention, part = layer.attention, layer.feed_forward
    norms = (
        layer.before_attention,
        layer.after_attention,
        layer.before_feed_forward,
        layer.after_feed_forward,
        attention.q_norm,
        attention.k_norm,
    )
    turning = [] if attention.rotary is None else tables[attention.rotary]
    cos, signed_sin = (table.data_ptr() for table in turning) if turning else (None, None)
    dense, mixture = (None, part) if isinstance(part, MixtureParts) else (part, None)
    return _Layer(
        *map(_norm, norms),
        *map(_linear, (attention.qkv, attention.output)),
        *(_feed_forward(dense), *_mixture(mixture)),
        *(cos, signed_sin, None if layout.sinks is None else layout.sinks.data_ptr()),
        *(k_cache.data_ptr(), v_cache.data_ptr(), layer.multiplier, layout.scale),
        *(layout.softcap or 0.0, layout.k_scale, layout.v_scale),
        *(turning[0].shape[-1] if turning else 0, attention.interleaved),
        *(layout.window or 0, CACHE_KINDS[layout.cache_dtype]),
    )


def _mixture(part: MixtureParts | None) -> tuple[ctypes.Structure, ...]:
    if part is None:
        return _Routing(), ExpertsStruct(), _FeedForward(), LinearStruct()
    gate = LinearStruct() if part.shared_gate is None else _linear(part.shared_gate)
    return _routing(part), _experts(part.experts), _feed_forward(part.shared), gate


def _routing(mixture: MixtureParts) -> _Routing:
    how, correction = mixture.router.routing, mixture.router.e_score_correction_bias
    first = 0 if mixture.experts.first is None else int(mixture.experts.first)
    return _Routing(
        *(_linear(mixture.router), None if correction is None else correction.data_ptr()),
        *(how.top_k, how.scoring == "sigmoid", how.renormalized, first, how.scale),
    )


def _experts(experts: Any) -> ExpertsStruct:
    return ExpertsStruct(
        *map(_linear, (experts.gate_up_proj, experts.down_proj)),
        *(experts.num_experts, experts.weighs_input, experts.limit),
    )
