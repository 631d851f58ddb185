"""Fuses RMSNorm, with or without an addition before, with quantisation."""

from __future__ import annotations

from typing import Any

import torch

from ..pattern import Pattern

piecework = torch.ops.piecework


def norm_static(x: Any, weight: Any, eps: Any, scale: Any, dtype: Any) -> Any:
    normalised = piecework.rms_norm.default(x, weight, eps)
    return piecework.quantize_static.default(normalised, scale, dtype)


def norm_dynamic(x: Any, weight: Any, eps: Any, group: Any, dtype: Any) -> Any:
    normalised = piecework.rms_norm.default(x, weight, eps)
    numbers, scale = piecework.quantize_dynamic.default(normalised, group, dtype)
    return numbers, scale


def add_norm_static(x: Any, residual: Any, weight: Any, eps: Any, scale: Any, dtype: Any) -> Any:
    normalised, total = piecework.add_rms_norm.default(x, residual, weight, eps)
    return piecework.quantize_static.default(normalised, scale, dtype), total


def add_norm_dynamic(x: Any, residual: Any, weight: Any, eps: Any, group: Any, dtype: Any) -> Any:
    normalised, total = piecework.add_rms_norm.default(x, residual, weight, eps)
    numbers, scale = piecework.quantize_dynamic.default(normalised, group, dtype)
    return numbers, scale, total


def norm_fp4(x: Any, weight: Any, eps: Any, factor: Any) -> Any:
    normalised = piecework.rms_norm.default(x, weight, eps)
    numbers, scales = piecework.quantize_fp4.default(normalised, factor)
    return numbers, scales


def add_norm_fp4(x: Any, residual: Any, weight: Any, eps: Any, factor: Any) -> Any:
    normalised, total = piecework.add_rms_norm.default(x, residual, weight, eps)
    numbers, scales = piecework.quantize_fp4.default(normalised, factor)
    return numbers, scales, total


PATTERNS = (
    Pattern(norm_static, piecework.rms_norm_quantize_static.default),
    Pattern(norm_dynamic, piecework.rms_norm_quantize_dynamic.default),
    Pattern(add_norm_static, piecework.add_rms_norm_quantize_static.default),
    Pattern(add_norm_dynamic, piecework.add_rms_norm_quantize_dynamic.default),
    Pattern(norm_fp4, piecework.rms_norm_quantize_fp4.default),
    Pattern(add_norm_fp4, piecework.add_rms_norm_quantize_fp4.default),
)
