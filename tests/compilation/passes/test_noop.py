"""What changes nothing goes, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from quantized_models import ARCHITECTURES, CONTEXT, traced_model

from piecework.compilation.passes.common.noop import Noop
from piecework.compilation.torch_private import Trace, trace

NOOP = Noop()


def traced(function: Callable[[torch.Tensor], torch.Tensor]) -> Trace:
    return trace(lambda x: function(x * 2) + 1, [x(6)], 512)


def x(tokens: int) -> torch.Tensor:
    return torch.randn(tokens, 4, 8, generator=torch.Generator().manual_seed(tokens)).bfloat16()


def run(found: Trace, tokens: int) -> torch.Tensor:
    values = [x(tokens) if isinstance(each, torch.Tensor) else tokens for each in found.values]
    module = torch.fx.GraphModule(torch.nn.Module(), found.graph)
    (result,) = module(*values)
    return result


def calls(found: Trace) -> int:
    return sum(node.op.startswith("call") for node in found.graph.nodes)


@pytest.mark.parametrize(
    ("function", "matches"),
    [
        (lambda y: y.view(-1, 4, 8), 1),
        (lambda y: y.view(y.shape), 1),
        (lambda y: y.reshape(y.shape[0], 4, 8).contiguous(), 2),
        (lambda y: y.flatten(0, 0), 1),
        (lambda y: y.to(torch.bfloat16), 1),
        (lambda y: y.bfloat16().view(-1, 4, 8), 2),
        (lambda y: y[:], 1),
        (lambda y: y[:, 0:8], 1),
        (lambda y: y[..., :], 1),
        (lambda y: y.float().bfloat16(), 2),
        (lambda y: y.float().half(), 1),
        (lambda y: y.float().to(torch.float64), 1),
        (lambda y: y.float().bfloat16() * y, 2),
        (lambda y: y.float().to("cpu") / 3, 1),
    ],
)
def test_noops(function: Callable[[torch.Tensor], torch.Tensor], matches: int) -> None:
    found = traced(function)
    expected, before = run(found, 5), calls(found)
    assert NOOP(found.graph, CONTEXT) == matches
    found.graph.lint()
    found.shapes.check_guards()
    assert calls(found) < before
    for tokens in (2, 9):
        assert torch.equal(run(found, tokens), run(traced(function), tokens))
    assert torch.equal(run(found, 5), expected)
    assert NOOP(found.graph, CONTEXT) == 0


@pytest.mark.parametrize(
    "function",
    [
        lambda y: y.half().bfloat16(),
        lambda y: (y.double() / 3).float().bfloat16(),
        lambda y: y[:, :2],
        lambda y: y.flatten(1).unflatten(1, (4, 8)),
        lambda y: y.view(-1, 8, 4),
        lambda y: y.transpose(1, 1),
        lambda y: y.float() + 1,
        lambda y: y[torch.arange(8) % 2],
        lambda y: y.transpose(0, 1).contiguous(),
    ],
    ids=range(9),
)
def test_what_changes_numbers_stays(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert NOOP(traced(function).graph, CONTEXT) == 0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_our_models_have_none(architecture: str) -> None:
    graph = traced_model(architecture, "per token int8").graph
    assert NOOP(graph, CONTEXT) == 0
