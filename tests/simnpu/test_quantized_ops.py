"""Quantised activations and INT8 products on an NPU: torch_npu's kernels give the reference's
numbers, up to what is rounded on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from test_layer_ops import launches, on_npu

from piecework.kernels import ops, reference
from piecework.kernels.npu import ops as npu_ops
from piecework.kernels.npu import quantized_ops
from piecework.kernels.npu.platform import NpuPlatform

EPS = 1e-5
HALVES = [torch.bfloat16, torch.float16]
SEEDS = st.integers(0, 2**32 - 1)
KERNELS = {
    "quantize_static": "npu::npu_quantize",
    "quantize_dynamic": "npu::npu_dynamic_quant",
    "scaled_linear": "npu::npu_quant_matmul",
    "add_rms_norm_quantize_static": "npu::npu_add_rms_norm_quant",
    "add_rms_norm_quantize_dynamic": "npu::npu_add_rms_norm_dynamic_quant",
    "silu_and_mul_quantize_static": "npu::npu_swiglu_quant",
}


@pytest.fixture(autouse=True)
def set_up(simnpu: Any) -> None:
    NpuPlatform().set_up(None)


def inputs(
    op: str, rows: int, size: int, dtype: torch.dtype, kind: torch.dtype = torch.int8
) -> list[Any]:
    """What an op is called with, on the host: x [rows, size], a gated one twice as wide."""
    x, residual = torch.randn(2, rows, size).to(dtype)
    weight, scale = torch.rand(size).to(dtype), torch.tensor([0.02])
    gated = torch.randn(rows, 2 * size).to(dtype)
    numbers, scales = reference.quantize_dynamic(x, size, kind)
    rows_of_weight, row_scales = reference.quantize_dynamic(torch.randn(24, size), size, kind)
    return {
        "quantize_static": [x, scale, kind],
        "quantize_dynamic": [x, size, kind],
        "scaled_linear": [numbers, scales, rows_of_weight, row_scales, None, dtype],
        "add_rms_norm_quantize_static": [x, residual, weight, EPS, scale, kind],
        "add_rms_norm_quantize_dynamic": [x, residual, weight, EPS, size, kind],
        "silu_and_mul_quantize_static": [gated, scale, kind],
    }[op]


def call(op: str, arguments: list[Any]) -> tuple[torch.Tensor, ...]:
    found: Any = getattr(torch.ops.piecework, op)(*arguments)
    return (found,) if torch.is_tensor(found) else tuple(found)


def assert_stands_for(
    op: str, found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], dtype: torch.dtype
) -> None:
    """Where the reference rounds to `dtype` in between, a kernel may come out one number beside."""
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype and one.is_contiguous()
    roundings = 4 * torch.finfo(dtype).eps
    (ours, *more), (theirs, *others) = (
        [each.cpu().float() for each in r] for r in (found, expected)
    )
    for one, other in zip(more, others, strict=True):
        torch.testing.assert_close(one, other, rtol=roundings, atol=roundings)
    step: torch.Tensor | float = 0.02 if "static" in op else 0.0
    if "dynamic" in op:
        step = others[0].repeat_interleave(theirs.shape[1] // others[0].shape[1], 1)
    if "quantize" in op:
        ours, theirs = ours * step, theirs * step
    assert ((ours - theirs).abs() <= 1.01 * step + roundings * theirs.abs().max()).all()


@pytest.mark.parametrize("op", KERNELS)
def test_a_graph_launches_the_kernel_and_never_waits(simnpu: Any, op: str) -> None:
    assert ops.has_kernel("npu", op)
    arguments = on_npu(inputs(op, 4, 32, torch.float16))
    assert KERNELS[op] in launches(simnpu, lambda: call(op, arguments))


def test_a_sum_in_bfloat16_keeps_the_scale_that_the_checkpoint_has(simnpu: Any) -> None:
    """The fused kernel would round it to bfloat16."""
    op = "add_rms_norm_quantize_static"
    arguments = on_npu(inputs(op, 4, 32, torch.bfloat16))
    names = launches(simnpu, lambda: call(op, arguments))
    assert "npu::npu_add_rms_norm" in names and "npu::npu_quantize" in names


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("x_scales", ["token", "tensor"])
@pytest.mark.parametrize("weight_scales", ["row", "tensor"])
@pytest.mark.parametrize("bias_dtype", [None, torch.float32, "of the result"])
@pytest.mark.parametrize("dtype", HALVES)
def test_products_with_each_kind_of_scale_and_bias(
    simnpu: Any, rows: int, x_scales: str, weight_scales: str, bias_dtype: Any, dtype: torch.dtype
) -> None:
    torch.manual_seed(rows)
    x, x_scale, weight, weight_scale, _, _ = inputs("scaled_linear", rows, 48, dtype)
    if x_scales == "tensor":
        x_scale = torch.tensor([0.013])
    if weight_scales == "tensor":
        weight_scale = torch.tensor([0.007])
    bias = None
    if bias_dtype is not None:
        bias = torch.randn(24).to(bias_dtype if isinstance(bias_dtype, torch.dtype) else dtype)
    arguments = [x, x_scale, weight, weight_scale, bias, dtype]
    (expected,), (found,) = (call("scaled_linear", a) for a in (arguments, on_npu(arguments)))
    tolerance = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.cpu(), expected, rtol=tolerance, atol=tolerance)


def test_a_head_with_more_rows_than_the_kernel_takes_is_multiplied_in_parts(
    simnpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized_ops, "_LONGEST", 48)
    monkeypatch.setattr(quantized_ops, "_ROWS_AT_ONCE", 32)
    numbers, scales = reference.quantize_dynamic(torch.randn(100, 48), 48, torch.int8)
    x, x_scale = reference.quantize_dynamic(torch.randn(3, 48), 48, torch.int8)
    for weight_scale in (scales, torch.tensor([0.02])):
        arguments = [x, x_scale, numbers, weight_scale, torch.randn(100), torch.float16]
        on_device = on_npu(arguments)
        (expected,), (found,) = (call("scaled_linear", a) for a in (arguments, on_device))
        torch.testing.assert_close(found.cpu(), expected, rtol=2e-3, atol=2e-3)
        names = launches(simnpu, lambda given=on_device: call("scaled_linear", given))
        assert names.count("npu::npu_quant_matmul") == 4


def test_what_a_graph_needs_beside_its_inputs_is_not_made_in_its_pool(
    simnpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is first called while recording goes through two kernels."""
    monkeypatch.setattr(npu_ops, "_offsets", {})
    op = "silu_and_mul_quantize_static"
    arguments = on_npu(inputs(op, 4, 74, torch.float16))
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        call(op, arguments)
    assert "npu::npu_swiglu" in simnpu.launches(graph)
    assert KERNELS[op] in launches(simnpu, lambda: call(op, arguments))


def test_gated_activations_are_quantised_by_rows_in_two_kernels(simnpu: Any) -> None:
    assert not ops.has_kernel("npu", "silu_and_mul_quantize_dynamic")


def changed(op: str, **by_place: Any) -> list[Any]:
    arguments = inputs(op, 3, 32, torch.bfloat16)
    for place, value in by_place.items():
        arguments[int(place[1:])] = value
    return arguments


def in_32_bits(op: str) -> list[Any]:
    return inputs(op, 3, 32, torch.float32)


@pytest.mark.parametrize(
    ("op", "make"),
    [
        ("quantize_dynamic", lambda: in_32_bits("quantize_dynamic")),
        ("scaled_linear", lambda: in_32_bits("scaled_linear")),
        ("add_rms_norm_quantize_static", lambda: in_32_bits("add_rms_norm_quantize_static")),
        ("add_rms_norm_quantize_dynamic", lambda: in_32_bits("add_rms_norm_quantize_dynamic")),
        (
            "add_rms_norm_quantize_dynamic",
            lambda: changed("add_rms_norm_quantize_dynamic", _4=16),
        ),
        (
            "silu_and_mul_quantize_static",
            lambda: inputs("silu_and_mul_quantize_static", 2, 4097, torch.float16),
        ),
        ("scaled_linear", lambda: changed("scaled_linear", _1=torch.rand(3, 2))),
        ("scaled_linear", lambda: changed("scaled_linear", _3=torch.rand(2, 1))),
        ("scaled_linear", lambda: changed("scaled_linear", _4=torch.randn(24).half())),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_fused_kernels_refuse_takes_another_way(
    simnpu: Any, op: str, make: Callable[[], list[Any]]
) -> None:
    arguments = make()
    on_device = on_npu(arguments)
    assert_stands_for(op, call(op, on_device), call(op, arguments), torch.bfloat16)
    assert KERNELS[op] not in launches(simnpu, lambda: call(op, on_device))


@pytest.mark.parametrize("op", KERNELS)
@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_is_none_of_the_kernels(simnpu: Any, op: str, kind: torch.dtype) -> None:
    arguments = inputs(op, 3, 32, torch.bfloat16, kind)
    assert getattr(npu_ops, op).__wrapped__(*arguments) is None


@pytest.mark.parametrize("op", KERNELS)
def test_a_step_of_no_tokens_is_none_for_a_kernel(simnpu: Any, op: str) -> None:
    arguments = [
        a[:0] if torch.is_tensor(a) and a.dim() == 2 and len(a) == 3 else a
        for a in inputs(op, 3, 32, torch.bfloat16)
    ]
    for one, other in zip(call(op, on_npu(arguments)), call(op, arguments), strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
