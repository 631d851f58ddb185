"""Projections read packed weights, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from piecework.compilation.passes.context import PassContext
from piecework.compilation.passes.cpu.pack_linear import PackLinear, unpacked
from piecework.kernels.cpu import packed_linear
from piecework.kernels.cpu.platform import CpuPlatform

pytestmark = pytest.mark.skipif(
    not packed_linear.is_available(), reason="oneDNN has no bfloat16 kernels for this CPU"
)
RUN_PACKED = PackLinear(packed_linear.OP)


def traced(
    function: nn.Module | Callable[..., torch.Tensor], *values: torch.Tensor, weights: set[int]
) -> tuple[fx.Graph, PassContext]:
    """`weights`: places of arguments."""
    graph = fx.symbolic_trace(function).graph
    places = graph.find_nodes(op="placeholder")
    for node, value in zip(places, values, strict=True):
        node.meta["example_value"] = value
    return graph, PassContext(frozenset(places[number] for number in weights))


def with_bias(
    x: torch.Tensor, first: torch.Tensor, bias: torch.Tensor, second: torch.Tensor
) -> torch.Tensor:
    return F.linear(F.linear(x, first, bias).relu(), second)


@pytest.mark.parametrize("tokens", [1, 3, 64])
def test_the_result_is_that_of_linear(tokens: int) -> None:
    torch.manual_seed(tokens)
    x, first, bias, second = (
        torch.randn(shape).bfloat16() for shape in ((tokens, 32), (48, 32), (48,), (16, 48))
    )
    graph, context = traced(with_bias, x, first, bias, second, weights={1, 2, 3})
    assert RUN_PACKED(graph, context) == 2
    plain, places = unpacked(graph)
    assert places == (1, 3)
    with torch.no_grad():
        result = fx.GraphModule(nn.Module(), graph)(
            x, packed_linear.pack(first), bias, packed_linear.pack(second)
        )
        as_traced = fx.GraphModule(nn.Module(), plain)(x, first, bias, second)
    expected = with_bias(x, first, bias, second)
    torch.testing.assert_close(result, expected)
    assert torch.equal(as_traced, expected)


@pytest.mark.parametrize(
    ("function", "dtype", "weights"),
    [
        (lambda x, w: F.linear(x, w) + w.sum(), torch.bfloat16, {1}),
        (lambda x, w: F.linear(w, x), torch.bfloat16, {1}),
        (lambda x, w: F.linear(w, w), torch.bfloat16, {1}),
        (lambda x, w: x @ w, torch.bfloat16, {1}),
        (lambda x, w: F.linear(x, w), torch.float32, {1}),
        (lambda x, w: F.linear(x, w), torch.bfloat16, set()),
    ],
    ids=["read twice", "not the weight", "both", "another op", "float32", "no weight"],
)
def test_other_readers_keep_the_weight_as_it_was(
    function: Callable[..., torch.Tensor], dtype: torch.dtype, weights: set[int]
) -> None:
    values = torch.ones(4, 32, dtype=dtype), torch.ones(32, 32, dtype=dtype)
    graph, context = traced(function, *values, weights=weights)
    assert RUN_PACKED(graph, context) == 0
    assert unpacked(graph)[1] == ()
    assert not [node for node in graph.nodes if node.target is packed_linear.OP]


def test_a_machine_with_little_memory_does_not_pack() -> None:
    platform = CpuPlatform()
    total = platform.memory().total
    assert platform.packs_linear(total // 8)
    assert not platform.packs_linear(total // 3)
