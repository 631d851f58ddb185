"""Projections read packed weights, and nothing else of a piece does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from piecework.compilation.passes.pack_linear import PackedGraph, pack_linear
from piecework.compilation.shapes import Extent, TensorSpec
from piecework.kernels.cpu import packed_linear
from piecework.kernels.cpu.platform import CpuPlatform

pytestmark = pytest.mark.skipif(
    not packed_linear.is_available(), reason="oneDNN has no bfloat16 kernels for this CPU"
)


def spec(*shape: int, weight: bool = True, dtype: str = "bfloat16") -> TensorSpec:
    stride = [Extent(0, int(torch.Size(shape[axis + 1 :]).numel())) for axis in range(len(shape))]
    return TensorSpec(
        shape=tuple(Extent(0, size) for size in shape),
        stride=tuple(stride),
        dtype=dtype,
        device="cpu",
        weight=weight,
    )


def packed(module: nn.Module | Callable[..., torch.Tensor], *specs: TensorSpec) -> PackedGraph:
    return pack_linear(fx.symbolic_trace(module).graph, specs, packed_linear.OP)


class WithBias(nn.Module):
    def forward(
        self, x: torch.Tensor, first: torch.Tensor, bias: torch.Tensor, second: torch.Tensor
    ) -> torch.Tensor:
        return F.linear(F.linear(x, first, bias).relu(), second)


@pytest.mark.parametrize("tokens", [1, 3, 64])
def test_the_result_is_that_of_linear(tokens: int) -> None:
    graph, places = packed(
        WithBias(), spec(tokens, 32, weight=False), spec(48, 32), spec(48), spec(16, 48)
    )
    assert places == (1, 3)
    torch.manual_seed(tokens)
    x, first, bias, second = (
        torch.randn(shape).bfloat16() for shape in ((tokens, 32), (48, 32), (48,), (16, 48))
    )
    with torch.no_grad():
        result = fx.GraphModule(nn.Module(), graph)(
            x, packed_linear.pack(first), bias, packed_linear.pack(second)
        )
    torch.testing.assert_close(result, WithBias()(x, first, bias, second))


@pytest.mark.parametrize(
    ("function", "weight"),
    [
        (lambda x, w: F.linear(x, w) + w.sum(), spec(32, 32)),
        (lambda x, w: F.linear(w, x), spec(32, 32)),
        (lambda x, w: F.linear(w, w), spec(32, 32)),
        (lambda x, w: x @ w, spec(32, 32)),
        (lambda x, w: F.linear(x, w), spec(32, 32, dtype="float32")),
        (lambda x, w: F.linear(x, w), spec(32, 32, weight=False)),
    ],
    ids=["read twice", "not the weight", "both", "another op", "float32", "no weight"],
)
def test_other_readers_keep_the_weight_as_it_was(
    function: Callable[..., torch.Tensor], weight: TensorSpec
) -> None:
    graph, places = packed(function, spec(4, 32, weight=False), weight)
    assert places == ()
    assert not [node for node in graph.nodes if node.target is packed_linear.OP]


def test_a_machine_with_little_memory_does_not_pack() -> None:
    platform = CpuPlatform()
    total = platform.memory().total
    assert platform.packs_linear(total // 8)
    assert not platform.packs_linear(total // 3)
