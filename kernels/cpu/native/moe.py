"""Layers of experts by the C++ kernels, on weights packed in panels (weights.h):
`piecework::native_fused_moe`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from .build import load_kernels
from .linear_struct import LinearStruct, linear_struct


class ExpertsStruct(ctypes.Structure):
    """`Experts` of moe.h."""

    _fields_ = [
        *((name, LinearStruct) for name in ("gate_up", "down")),
        *((name, ctypes.c_int32) for name in ("count", "weighs_input")),
        ("limit", ctypes.c_float),
    ]


_LIBRARY = torch.library.Library("piecework", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "native_fused_moe(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor gate_up, "
    "Tensor? gate_up_bias, Tensor? gate_up_scale, Tensor down, Tensor? down_bias, "
    "Tensor? down_scale, int[] sizes, int[] layouts, int[] groups, float limit, "
    "bool weighs_input) -> Tensor"
)  # type: ignore[no-untyped-call]


def fused_moe(
    library: ctypes.CDLL,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    gate_up_scale: torch.Tensor | None,
    down: torch.Tensor,
    down_bias: torch.Tensor | None,
    down_scale: torch.Tensor | None,
    sizes: Sequence[int],
    layouts: Sequence[int],
    groups: Sequence[int],
    limit: float,
    weighs_input: bool,
) -> torch.Tensor:
    """Compute `reference.fused_moe` of x [T, H] bfloat16.

    `sizes` holds E, I and an expert's rows of gate_up. `layouts` holds the layouts of gate_up and
    down. If a product quantises its x, it uses the scale [1], or a scale per `groups` columns.
    """
    (tokens, hidden), (experts, width, opened) = x.shape, sizes
    assert x.dtype == torch.bfloat16 and x.stride(1) == 1
    ids = topk_ids.to(torch.int64).contiguous()
    weights = topk_weights.to(torch.float32).contiguous()
    assert ids.shape == weights.shape == (tokens, ids.shape[1])
    layer = ExpertsStruct(
        linear_struct(
            gate_up,
            gate_up_bias,
            hidden,
            experts * opened,
            layouts[0],
            gate_up_scale,
            groups[0],
        ),
        linear_struct(down, down_bias, width, experts * hidden, layouts[1], down_scale, groups[1]),
        experts,
        weighs_input,
        limit,
    )
    out = x.new_empty(tokens, hidden)
    library.piecework_moe(
        ctypes.byref(layer),
        ctypes.c_void_p(x.data_ptr()),
        ctypes.c_int64(x.stride(0)),
        ctypes.c_void_p(ids.data_ptr()),
        ctypes.c_void_p(weights.data_ptr()),
        tokens,
        ids.shape[1],
        ctypes.c_void_p(out.data_ptr()),
        torch.get_num_threads(),
    )
    return out


def _fused_moe(*arguments: object) -> torch.Tensor:
    library = load_kernels()
    assert library is not None
    return fused_moe(library, *arguments)  # type: ignore[arg-type]


_LIBRARY.impl("native_fused_moe", _fused_moe, "CPU")  # type: ignore[no-untyped-call]
_LIBRARY.impl("native_fused_moe", lambda x, *_: x.new_empty(x.shape), "Meta")  # type: ignore[no-untyped-call]

OP: torch._ops.OpOverload = torch.ops.piecework.native_fused_moe.default
