"""The structs of step.h, a decoder and one step of it, filled from the descriptions of the model's
parts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from ...attention import KVLayout
from ...step_parts import FeedForwardParts, LayerParts, MixtureParts, NormParts
from .attention import CACHE_KINDS
from .linear_struct import Layout, LinearStruct, linear_struct
from .lora import adapters_address
from .moe import ExpertsStruct

_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1}


class NormStruct(ctypes.Structure):
    _fields_ = [("weight", _POINTER), ("eps", _FLOAT), ("spans_heads", _INT)]


class FeedForwardStruct(ctypes.Structure):
    _fields_ = [("gate_up", LinearStruct), ("down", LinearStruct), ("activation", _INT)]


class RoutingStruct(ctypes.Structure):
    _fields_ = [
        *(("router", LinearStruct), ("correction", _POINTER)),
        *((name, _INT) for name in ("top_k", "is_sigmoid", "is_renormalized", "first")),
        ("scale", _FLOAT),
    ]


class LayerStruct(ctypes.Structure):
    _fields_ = [
        *(
            (name, NormStruct)
            for name in (
                "before_attention",
                "after_attention",
                "before_feed_forward",
                "after_feed_forward",
                "q_norm",
                "k_norm",
            )
        ),
        *(("qkv", LinearStruct), ("output", LinearStruct), ("dense", FeedForwardStruct)),
        *(("routing", RoutingStruct), ("experts", ExpertsStruct)),
        *(("shared", FeedForwardStruct), ("shared_gate", LinearStruct)),
        *((name, _POINTER) for name in ("cos", "signed_sin", "sinks", "k_cache", "v_cache")),
        *((name, _FLOAT) for name in ("multiplier", "scale", "softcap", "k_scale", "v_scale")),
        *((name, _INT) for name in ("turned", "is_interleaved", "window", "table")),
        *((name, _INT) for name in ("cache_kind", "kept")),
    ]


class ModelStruct(ctypes.Structure):
    _fields_ = [
        *(("layers", _POINTER), ("embedding", LinearStruct), ("norm", NormStruct)),
        *(("head", LinearStruct), ("member", _POINTER)),
        *(
            (name, _INT)
            for name in (
                "num_layers",
                "hidden",
                "intermediate",
                "heads",
                "kv_heads",
                "head_size",
                "page_size",
                "group",
                "skipped",
                "states",
                "keeps_last",
            )
        ),
        ("embedding_scale", _FLOAT),
    ]


class StepStruct(ctypes.Structure):
    _fields_ = [
        *((name, _POINTER) for name in ("model", "ids", "positions", "turns")),
        *((name, _POINTER * 2) for name in ("slots", "tables")),
        *((name, _POINTER) for name in ("query_lens", "out")),
        *((name, _POINTER) for name in ("sampled", "chosen", "logits", "draws", "adapters")),
        ("table_stride", _LONG),
        *((name, _INT) for name in ("requests", "tokens", "samples")),
    ]


def linear_of(part: Any) -> LinearStruct:
    made = part.input
    scale, group = (None, 0) if made is None else (made.scale, made.group or part.in_features)
    shape = part.in_features, part.out_features, part.layout
    adapters = adapters_address(part.adapters)
    return linear_struct(part.weight, part.bias, *shape, scale, group, order_of(part), adapters)


def table_of(embedding: Any) -> LinearStruct:
    shape = embedding.hidden_size, embedding.num_rows
    layout = Layout.ROWS if embedding.layout is None else embedding.layout
    return linear_struct(embedding.weight, None, *shape, layout)


def order_of(part: Any) -> torch.Tensor | None:
    """Return the order of its input's columns, or None for the usual order."""
    order: torch.Tensor | None = getattr(part, "input_order", None)
    return order


def norm_struct(part: NormParts | None) -> NormStruct:
    return (
        NormStruct()
        if part is None
        else NormStruct(part.weight.data_ptr(), part.eps, part.spans_heads)
    )


def _feed_forward(part: FeedForwardParts | None) -> FeedForwardStruct:
    if part is None:
        return FeedForwardStruct()
    return FeedForwardStruct(
        linear_of(part.gate_up), linear_of(part.down), ACTIVATIONS[part.activation]
    )


def layer_struct(
    layer: LayerParts,
    layout: KVLayout,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tables: Sequence[Sequence[torch.Tensor]],
) -> LayerStruct:
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
    return LayerStruct(
        *map(norm_struct, norms),
        *map(linear_of, (attention.qkv, attention.output)),
        *(_feed_forward(dense), *_mixture(mixture)),
        *(cos, signed_sin, None if layout.sinks is None else layout.sinks.data_ptr()),
        *(k_cache.data_ptr(), v_cache.data_ptr(), layer.multiplier, layout.scale),
        *(layout.softcap or 0.0, layout.k_scale, layout.v_scale),
        *(turning[0].shape[-1] if turning else 0, attention.interleaved),
        *(layout.window or 0, 0, CACHE_KINDS[layout.cache_dtype]),
    )


def _mixture(part: MixtureParts | None) -> tuple[ctypes.Structure, ...]:
    if part is None:
        return RoutingStruct(), ExpertsStruct(), FeedForwardStruct(), LinearStruct()
    gate = LinearStruct() if part.shared_gate is None else linear_of(part.shared_gate)
    return _routing(part), _experts(part.experts), _feed_forward(part.shared), gate


def _routing(mixture: MixtureParts) -> RoutingStruct:
    how, correction = mixture.router.routing, mixture.router.e_score_correction_bias
    first = 0 if mixture.experts.first is None else int(mixture.experts.first)
    return RoutingStruct(
        *(linear_of(mixture.router), None if correction is None else correction.data_ptr()),
        *(how.top_k, how.scoring == "sigmoid", how.renormalized, first, how.scale),
    )


def _experts(experts: Any) -> ExpertsStruct:
    return ExpertsStruct(
        *map(linear_of, (experts.gate_up_proj, experts.down_proj)),
        *(experts.num_experts, experts.weighs_input, experts.limit),
    )
