"""The signatures of the ops that are nodes of a traced forward, and their results' shapes."""

from __future__ import annotations

from typing import Any

import torch


def _like_first(x: torch.Tensor, *others: Any) -> torch.Tensor:
    return x.new_empty(x.shape)


def _quantized(x: torch.Tensor, group: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return empty numbers and scales for rows like `x`."""
    scale = x.new_empty(*x.shape[:-1], x.shape[-1] // group, dtype=torch.float32)
    return x.new_empty(x.shape, dtype=dtype), scale


def _fp4(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return empty numbers and scales of `quantize_fp4` for rows like `x`."""
    *rows, columns = x.shape
    numbers = x.new_empty(*rows, columns // 2, dtype=torch.uint8)
    return numbers, x.new_empty(*rows, columns // 16, dtype=torch.float8_e4m3fn)


def _gated(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


# Ops that are nodes of a traced forward: their signatures, and functions that return empty results.
TRACED = {
    "rms_norm": ("(Tensor x, Tensor weight, float eps) -> Tensor", _like_first),
    "add_rms_norm": (
        "(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
        lambda x, *others: (x.new_empty(x.shape), x.new_empty(x.shape)),
    ),
    "silu_and_mul": ("(Tensor x) -> Tensor", _gated),
    "rotary_embedding": ("(Tensor x, Tensor cos, Tensor signed_sin) -> Tensor", _like_first),
    "norm_rotary_embedding": (
        "(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, float eps, Tensor cos, "
        "Tensor signed_sin) -> Tensor",
        lambda q, k, *others: q.new_empty(q.shape[0], q.shape[1] + k.shape[1], q.shape[2]),
    ),
    "quantize_static": (
        "(Tensor x, Tensor scale, ScalarType dtype) -> Tensor",
        lambda x, scale, dtype: x.new_empty(x.shape, dtype=dtype),
    ),
    "quantize_dynamic": (
        "(Tensor x, int group, ScalarType dtype) -> (Tensor, Tensor)",
        _quantized,
    ),
    "quantize_fp4": (
        "(Tensor x, Tensor factor) -> (Tensor, Tensor)",
        lambda x, factor: _fp4(x),
    ),
    "scaled_linear": (
        "(Tensor x, Tensor x_scale, Tensor weight, Tensor weight_scale, Tensor? bias, "
        "ScalarType dtype) -> Tensor",
        lambda x, x_scale, weight, weight_scale, bias, dtype: x.new_empty(
            x.shape[0], weight.shape[0], dtype=dtype
        ),
    ),
    "fp4_linear": (
        "(Tensor x, Tensor x_scales, Tensor weight, Tensor weight_scales, Tensor scale, "
        "Tensor? bias, ScalarType dtype) -> Tensor",
        lambda x, x_scales, weight, weight_scales, scale, bias, dtype: x.new_empty(
            x.shape[0], weight.shape[0], dtype=dtype
        ),
    ),
    "weight_only_linear": (
        "(Tensor x, Tensor weight, Tensor scale, Tensor zero, Tensor? bias, int bits) -> Tensor",
        lambda x, weight, *others: x.new_empty(x.shape[0], weight.shape[0]),
    ),
    "rms_norm_quantize_static": (
        "(Tensor x, Tensor weight, float eps, Tensor scale, ScalarType dtype) -> Tensor",
        lambda x, weight, eps, scale, dtype: x.new_empty(x.shape, dtype=dtype),
    ),
    "rms_norm_quantize_dynamic": (
        "(Tensor x, Tensor weight, float eps, int group, ScalarType dtype) -> (Tensor, Tensor)",
        lambda x, weight, eps, group, dtype: _quantized(x, group, dtype),
    ),
    "add_rms_norm_quantize_static": (
        "(Tensor x, Tensor residual, Tensor weight, float eps, Tensor scale, ScalarType dtype) "
        "-> (Tensor, Tensor)",
        lambda x, residual, weight, eps, scale, dtype: (
            x.new_empty(x.shape, dtype=dtype),
            x.new_empty(x.shape),
        ),
    ),
    "add_rms_norm_quantize_dynamic": (
        "(Tensor x, Tensor residual, Tensor weight, float eps, int group, ScalarType dtype) "
        "-> (Tensor, Tensor, Tensor)",
        lambda x, residual, weight, eps, group, dtype: (
            *_quantized(x, group, dtype),
            x.new_empty(x.shape),
        ),
    ),
    "silu_and_mul_quantize_static": (
        "(Tensor x, Tensor scale, ScalarType dtype) -> Tensor",
        lambda x, scale, dtype: x.new_empty(*x.shape[:-1], x.shape[-1] // 2, dtype=dtype),
    ),
    "silu_and_mul_quantize_dynamic": (
        "(Tensor x, int group, ScalarType dtype) -> (Tensor, Tensor)",
        lambda x, group, dtype: _quantized(_gated(x), group, dtype),
    ),
    "rms_norm_quantize_fp4": (
        "(Tensor x, Tensor weight, float eps, Tensor factor) -> (Tensor, Tensor)",
        lambda x, weight, eps, factor: _fp4(x),
    ),
    "add_rms_norm_quantize_fp4": (
        "(Tensor x, Tensor residual, Tensor weight, float eps, Tensor factor) "
        "-> (Tensor, Tensor, Tensor)",
        lambda x, residual, weight, eps, factor: (*_fp4(x), x.new_empty(x.shape)),
    ),
    "silu_and_mul_quantize_fp4": (
        "(Tensor x, Tensor factor) -> (Tensor, Tensor)",
        lambda x, factor: _fp4(_gated(x)),
    ),
    "choose_experts": (
        "(Tensor logits, Tensor? correction, int top_k, bool sigmoid, bool renormalized, "
        "int groups, int top_groups, int group_best, float scale, float least_sum) "
        "-> (Tensor, Tensor)",
        lambda logits, correction, top_k, *others: (
            logits.new_empty(logits.shape[0], top_k, dtype=torch.int64),
            logits.new_empty(logits.shape[0], top_k, dtype=torch.float32),
        ),
    ),
    "fused_moe": (
        "(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor gate_up, Tensor? gate_up_bias, "
        "Tensor down, Tensor? down_bias, float limit, bool weighs_input) -> Tensor",
        _like_first,
    ),
    "lora": (
        "(Tensor y, Tensor x, Tensor a, Tensor b, Tensor scales, Tensor ranks, Tensor slots, "
        "int[] rows) -> Tensor",
        _like_first,
    ),
}

# The ops among these that no compiler traces into, because only kernels make them fast.
PRODUCTS = ("scaled_linear", "fp4_linear", "weight_only_linear", "fused_moe", "lora")
