"""Decode steps of a Llama-shaped model in one native call: the model's own weights, read where they
lie.

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
from .attention import CACHE_KINDS
from .build import load_kernels
from .linear import PANEL, SCALED_COLUMNS, Layout, LinearStruct, linear_struct
from .moe import ExpertsStruct
from .shared import SLOT_BYTES, SharedMemoryGroup

_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


class _Routing(ctypes.Structure):
    _fields_ = [
        ("router", LinearStruct),
        *((name, _INT) for name in ("top_k", "is_sigmoid", "is_renormalized", "first")),
        ("scale", _FLOAT),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, _POINTER) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
        *((name, LinearStruct) for name in ("qkv", "output", "gate_up", "down")),
        *(("routing", _Routing), ("experts", ExpertsStruct)),
        *((name, _POINTER) for name in ("k_cache", "v_cache")),
        *((name, _FLOAT) for name in ("scale", "k_scale", "v_scale")),
        *(("window", _INT), ("cache_kind", _INT)),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        *((name, _POINTER) for name in ("layers", "embedding", "norm", "cos", "signed_sin")),
        ("member", _POINTER),
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
        ("eps", _FLOAT),
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
        self._owners = (model, k_cache, v_cache)
        decoder = model.model
        layers = [
            _layer(*parts) for parts in zip(decoder.layers, layouts, k_cache, v_cache, strict=True)
        ]
        self._layers = (_Layer * len(layers))(*layers)
        self._hidden = decoder.embed_tokens.weight.shape[1]
        first = layouts[0]
        embedded = len(decoder.embed_tokens.weight)
        if group is not None:
            assert decoder.embed_tokens.first == group.rank * embedded
            self.max_tokens = min(self.max_tokens, SLOT_BYTES // (2 * self._hidden))
        self._model = _Model(
            ctypes.addressof(self._layers),
            *(
                part.data_ptr()
                for part in (
                    decoder.embed_tokens.weight,
                    decoder.norm.weight,
                    decoder.rotaries[0].cos,
                    decoder.rotaries[0].signed_sin,
                )
            ),
            None if group is None else group.member,
            *(embedded, len(layers), self._hidden),
            max(
                (
                    layer.mlp.down_proj.in_features
                    for layer in decoder.layers
                    if not _is_mixed(layer)
                ),
                default=0,
            ),
            *(first.num_heads, first.num_kv_heads, first.key_size),
            page_size_of(k_cache[0], first.num_kv_heads, first.key_size),
            *(first.group, first.skipped_heads),
            decoder.norm.eps,
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
    """None for what the kernels do not know: weights that are not packed, shapes that are not
    Llama's, ranks that share no memory, no kernels.
    """
    library = load_kernels()
    if library is None or not is_known(model, layouts):
        return None
    decoder: Any = model.model
    if not decoder.layers[0].self_attn.o_proj.is_split:
        return NativeStep(library, model, layouts, k_cache, v_cache)
    group = get_group(TENSOR_PARALLEL)
    if not isinstance(group, SharedMemoryGroup):
        return None
    return NativeStep(library, model, layouts, k_cache, v_cache, group)


def is_known(model: Any, layouts: Sequence[KVLayout]) -> bool:
    """Whether it is a decoder of Llama's shape with packed weights, in bfloat16, whose gates and
    ups lie in panels of their own, and whose layers have the same heads.
    """
    if not getattr(model, "layers_are_llamas", False):
        return False
    widths = {
        layer.mlp.down_proj.in_features for layer in model.model.layers if not _is_mixed(layer)
    }
    heads = {
        (each.num_heads, each.num_kv_heads, each.key_size, each.value_size, each.dtype)
        for each in layouts
    }
    _, _, key_size, value_size, dtype = next(iter(heads))
    linears = [part for layer in model.model.layers for part in _linears_of(layer)]
    packed = {
        id(tensor)
        for linear in (*linears, model.lm_head)
        for tensor in (
            *(linear.weight, _order_of(linear)),
            *(linear.input.parameters() if linear.input else ()),
        )
    }
    others = [
        tensor
        for tensor in (*model.parameters(), *model.buffers())
        if tensor.is_floating_point() and id(tensor) not in packed
    ]
    return (
        all(_is_packed(linear) for linear in linears)
        and all(
            tensor.dtype == torch.bfloat16
            and tensor.is_contiguous()
            and tensor.device.type == "cpu"
            for tensor in others
        )
        and len(heads) == 1
        and all(each.is_plain for each in layouts)
        and (key_size, dtype) == (value_size, torch.bfloat16)
        and key_size % 2 == 0
        and all(map(_knows_feed_forward, model.model.layers))
        and len(widths) <= 1
    )


def _linears_of(layer: Any) -> tuple[Any, ...]:
    return (
        layer.self_attn.qkv_proj,
        layer.self_attn.o_proj,
        *_feed_forward(layer),
    )


def _is_mixed(layer: Any) -> bool:
    """Whether it has experts."""
    return hasattr(layer.mlp, "experts")


def _feed_forward(layer: Any) -> tuple[Any, ...]:
    if _is_mixed(layer):
        experts = layer.mlp.experts
        return experts.gate_up_proj, experts.down_proj, layer.mlp.gate
    return layer.mlp.gate_up_proj, layer.mlp.down_proj


def _knows_feed_forward(layer: Any) -> bool:
    """Whether gates and ups lie in panels of their own, and experts are chosen as the kernels do
    it.
    """
    if not _is_mixed(layer):
        return bool(layer.mlp.down_proj.in_features % PANEL == 0)
    router = layer.mlp.gate
    return (
        {name for name, _ in layer.mlp.named_children()} == {"gate", "experts"}
        and router.e_score_correction_bias is None
        and router.routing.num_groups == 1
        and _order_of(layer.mlp.experts.gate_up_proj) is None
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


def _layer(layer: Any, layout: KVLayout, k_cache: torch.Tensor, v_cache: torch.Tensor) -> _Layer:
    attention = layer.self_attn
    norms = (
        layer.input_layernorm,
        layer.post_attention_layernorm,
        attention.q_norm,
        attention.k_norm,
    )
    mixes = _is_mixed(layer)
    none = LinearStruct()
    return _Layer(
        *(None if norm is None else norm.weight.data_ptr() for norm in norms),
        *(_linear(part) for part in (attention.qkv_proj, attention.o_proj)),
        *((none, none) if mixes else map(_linear, _feed_forward(layer))),
        *(
            (_routing(layer.mlp), _experts(layer.mlp.experts))
            if mixes
            else (_Routing(), ExpertsStruct())
        ),
        *(k_cache.data_ptr(), v_cache.data_ptr(), layout.scale, layout.k_scale, layout.v_scale),
        *(layout.window or 0, CACHE_KINDS[layout.cache_dtype]),
    )


def _routing(mixture: Any) -> _Routing:
    how = mixture.gate.routing
    first = 0 if mixture.experts.first is None else int(mixture.experts.first)
    is_sigmoid = how.scoring == "sigmoid"
    return _Routing(
        _linear(mixture.gate), how.top_k, is_sigmoid, how.renormalized, first, how.scale
    )


def _experts(experts: Any) -> ExpertsStruct:
    return ExpertsStruct(
        *map(_linear, (experts.gate_up_proj, experts.down_proj)),
        *(experts.num_experts, experts.weighs_input, experts.limit),
    )
