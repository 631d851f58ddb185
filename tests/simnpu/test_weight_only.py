"""Weights of 4 and 8 bits, laid out for an NPU and multiplied by its kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from piecework.kernels import reference
from piecework.kernels.npu import refusals, weight_only
from piecework.kernels.npu.platform import NpuPlatform
from piecework.kernels.npu.weight_only import Layout, WeightOnlyKernels

HALVES = [torch.bfloat16, torch.float16]
SEEDS = st.integers(0, 2**32 - 1)


@pytest.fixture(autouse=True)
def set_up(simnpu: Any) -> None:
    NpuPlatform().set_up(None)


class Weight:
    """A weight as `ops.weight_only_linear` takes it, with x and a bias."""

    def __init__(
        self, bits: int, rows: int, groups: int, columns: int, dtype: torch.dtype, zeros: str
    ) -> None:
        self.bits, self.dtype = bits, dtype
        self.shape = rows, groups * columns
        self.kind = f"weight_only {bits} {columns} {zeros}"
        self.numbers = torch.randint(0, 256, (rows, groups * columns * bits // 8)).to(torch.uint8)
        self.scale = (torch.rand(rows, groups) * 0.1 + 0.01).to(dtype)
        middle = 1 << bits - 1
        self.zero = torch.randint(0, 1 << bits, (rows, groups)).to(torch.uint8)
        if zeros == "symmetric":
            self.zero.fill_(middle)
        self.x, self.bias = torch.randn(3, self.shape[1]).to(dtype), torch.randn(rows).to(dtype)

    def packed(self, kernels: WeightOnlyKernels) -> tuple[torch.Tensor, int]:
        layout = kernels.layout(self.kind, self.shape[1])
        assert layout is not None
        pairs = torch.stack((self.scale.float(), self.zero.float()), -1)
        half = self.shape[0] // 2
        parts = [(self.numbers[part], pairs[part]) for part in (slice(half), slice(half, None))]
        weight = kernels.pack(self.kind, *zip(*parts, strict=True))
        assert weight.shape == kernels.packed_shape(self.kind, self.shape[1], self.shape[0])
        return weight, layout

    def product(self, *, bias: bool = True, x: torch.Tensor | None = None) -> torch.Tensor:
        weight, layout = self.packed(WeightOnlyKernels(self.dtype))
        x = self.x if x is None else x
        found: torch.Tensor = WeightOnlyKernels.op(
            x.npu(), weight, self.bias.npu() if bias else None, self.shape[0], layout
        )
        return found.cpu()

    def expected(self, *, bias: bool = True) -> torch.Tensor:
        return reference.weight_only_linear(
            self.x,
            self.numbers,
            self.scale,
            self.zero,
            self.bias if bias else None,
            self.bits,
        )


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """A sum is rounded once, and in the reference once more before the bias."""
    tolerance = 4 * torch.finfo(expected.dtype).eps
    assert found.shape == expected.shape and found.dtype == expected.dtype
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=8 * tolerance)


@settings(max_examples=20, deadline=None)
@given(
    seed=SEEDS,
    bits=st.sampled_from([4, 8]),
    rows=st.integers(2, 40),
    groups=st.integers(1, 4),
    columns=st.sampled_from([32, 64, 96]),
    dtype=st.sampled_from(HALVES),
    zeros=st.sampled_from(["zeros", "symmetric"]),
    bias=st.booleans(),
)
def test_products_are_the_references(
    simnpu: Any,
    seed: int,
    bits: int,
    rows: int,
    groups: int,
    columns: int,
    dtype: torch.dtype,
    zeros: str,
    bias: bool,
) -> None:
    torch.manual_seed(seed)
    weight = Weight(bits, rows, groups, columns, dtype, zeros)
    assert_near(weight.product(bias=bias), weight.expected(bias=bias))


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_with_one_scale_may_be_of_any_even_length(simnpu: Any, bits: int) -> None:
    weight = Weight(bits, 24, 1, 74, torch.bfloat16, "zeros")
    assert_near(weight.product(), weight.expected())


@pytest.mark.parametrize("bits", [4, 8])
def test_a_weight_with_more_rows_than_the_kernel_takes_is_multiplied_in_parts(
    simnpu: Any, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_only, "_ROWS_AT_ONCE", 32)
    weight = Weight(bits, 77, 2, 32, torch.float16, "zeros")
    assert_near(weight.product(), weight.expected())


def test_long_rows_are_packed_in_parts(simnpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_only, "_BYTES_AT_ONCE", 24)
    weight = Weight(4, 16, 3, 32, torch.float16, "zeros")
    assert_near(weight.product(), weight.expected())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeros", ["zeros", "symmetric"])
def test_where_the_device_refuses_the_kernel_plain_torch_reads_the_same_bytes(
    simnpu: Any, bits: int, zeros: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **named: Any) -> torch.Tensor:
        raise RuntimeError("not supported")

    monkeypatch.setattr(torch.ops.npu, "npu_weight_quant_batchmatmul", refuse)
    weight = Weight(bits, 30, 2, 64, torch.bfloat16, zeros)
    assert_near(weight.product(), weight.expected())
    assert list(refusals.refused) == ["npu_weight_only_linear"]
    refusals.refused.clear()


def test_a_graph_launches_the_kernel_on_views_of_the_packed_bytes(simnpu: Any) -> None:
    weight = Weight(4, 24, 4, 32, torch.bfloat16, "zeros")
    packed, layout = weight.packed(WeightOnlyKernels(torch.bfloat16))
    x, bias = weight.x.npu(), weight.bias.npu()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        out = WeightOnlyKernels.op(x, packed, bias, 24, layout)
    names = simnpu.launches(graph)
    assert names == ["aten::copy_", "npu::npu_weight_quant_batchmatmul"], "the bias, the product"
    x.copy_(torch.flip(weight.x, [0]))
    graph.replay()
    assert_near(out.cpu(), torch.flip(weight.expected(), [0]))


def test_no_tokens_give_no_rows(simnpu: Any) -> None:
    weight = Weight(4, 24, 4, 32, torch.bfloat16, "zeros")
    assert weight.product(x=weight.x[:0]).shape == (0, 24)


@pytest.mark.parametrize(
    ("kind", "in_features"),
    [
        ("weight_only 4 16 zeros", 128),
        ("weight_only 4 48 zeros", 96),
        ("weight_only 4 128 zeros", 1 << 16),
        ("Q4_1", 128),
        ("int8", 128),
        ("bfloat16", 128),
    ],
)
def test_what_the_kernel_does_not_take_is_not_packed(
    simnpu: Any, kind: str, in_features: int
) -> None:
    assert WeightOnlyKernels(torch.bfloat16).layout(kind, in_features) is None


@given(bits=st.sampled_from([4, 8]), group=st.integers(1, 65535), symmetric=st.booleans())
def test_a_layout_is_one_number(bits: int, group: int, symmetric: bool) -> None:
    layout = Layout(bits, group, symmetric)
    assert Layout.of_number(layout.number) == layout


@pytest.mark.parametrize(
    ("dtype", "found"), [(torch.bfloat16, True), (torch.float16, True), (torch.float32, False)]
)
def test_kernels_are_for_16_bits(
    simnpu: Any, dtype: torch.dtype, found: bool, make: Callable[..., Any] = NpuPlatform
) -> None:
    assert (make().linear_kernels(dtype, make().attention_backend()) is not None) is found
