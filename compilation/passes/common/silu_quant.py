"""Fuses SiLU and multiplication with quantisation."""

from __future__ import annotations

from typing import Any

import torch

from ..pattern import Pattern

piecework = torch.ops.piecework


def static(x: Any, scale: Any, dtype: Any) -> Any:
    return piecework.quantize_static.default(piecework.silu_and_mul.default(x), scale, dtype)


def dynamic(x: Any, group: Any, dtype: Any) -> Any:
    gated = piecework.silu_and_mul.default(x)
    numbers, scale = piecework.quantize_dynamic.default(gated, group, dtype)
    return numbers, scale


def fp4(x: Any, factor: Any) -> Any:
    gated = piecework.silu_and_mul.default(x)
    numbers, scales = piecework.quantize_fp4.default(gated, factor)
    return numbers, scales


PATTERNS = (
    Pattern(static, piecework.silu_and_mul_quantize_static.default),
    Pattern(dynamic, piecework.silu_and_mul_quantize_dynamic.default),
    Pattern(fp4, piecework.silu_and_mul_quantize_fp4.default),
)
