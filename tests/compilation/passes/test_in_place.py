"""What nobody needs any more is written over, and what somebody does is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import toy_forward  # noqa: F401  (registers split ops)
from quantized_models import CONTEXT, LAYERS, models_with, ours, run, traced_model
from torch import fx, nn
from torch.nn import functional as F

from piecework.compilation.pass_manager import PassManager
from piecework.compilation.passes.common.in_place import InPlace
from piecework.compilation.passes.common.lower import Lower
from piecework.compilation.passes.config import PassConfig
from piecework.compilation.torch_private import Trace, trace
from piecework.kernels import ops
from piecework.kernels.cpu.platform import CpuPlatform
from tests.thread_ranks import on_ranks, thread_ranks

IN_PLACE = InPlace()


def in_place_ops(graph: fx.Graph) -> list[str]:
    targets = [node.target for node in graph.nodes if node.op == "call_method"]
    return [str(target) for target in targets if str(target).endswith("_")]


def x(tokens: int) -> torch.Tensor:
    return torch.randn(tokens, 8, generator=torch.Generator().manual_seed(tokens))


def computed(found: Trace, tokens: int) -> torch.Tensor:
    values: list[Any] = [
        x(tokens) if isinstance(each, torch.Tensor) else tokens for each in found.values
    ]
    kept = [value.clone() for value in values if isinstance(value, torch.Tensor)]
    (result,) = fx.GraphModule(nn.Module(), found.graph)(*values)
    given = [value for value in values if isinstance(value, torch.Tensor)]
    assert all(torch.equal(now, before) for now, before in zip(given, kept, strict=True))
    return result


def after_attention(y: torch.Tensor) -> torch.Tensor:
    z = F.silu(y)
    return torch.ops.toy.attend_fresh(y, y, y, 0) + z * 2


@pytest.mark.parametrize(
    ("function", "forms"),
    [
        (lambda y: F.silu(y) * y, ["mul_"]),
        (lambda y: y * F.silu(y), ["mul_"]),
        (lambda y: (y * 2 + y) / 3, ["add_", "div_"]),
        (lambda y: F.silu(y).clamp(-1, 1).round(), ["clamp_", "round_"]),
        (lambda y: (y.double() * 2).float() + 1, ["mul_", "add_"]),
        # A number minus what is there has no in-place form of that operand.
        (lambda y: y - F.silu(y), []),
        # The input of the forward is its caller's.
        (lambda y: y * 2, []),
        (lambda y: y.float() * 2, []),
        # Others read it later: itself, or a view of it.
        (lambda y: (z := F.silu(y)) * 2 + z, ["add_"]),
        (lambda y: (z := F.silu(y)).view(-1, 4).sum() + (z * 2), ["add_"]),
        (lambda y: (z := F.silu(y).view(-1, 8)) * 2 + z, ["add_"]),
        # Numbers of tokens are no memory.
        (lambda y: y + (y.shape[0] * 2 + 1), []),
        # Another shape or type does not fit.
        (lambda y: F.silu(y)[:, :1] * y, []),
        (lambda y: y.amax(-1, keepdim=True) * y, []),
        (lambda y: F.silu(y) * y.double(), ["mul_"]),
        (lambda y: (z := F.silu(y)) * z, []),
        # What another piece gave stays as it is.
        (after_attention, ["add_"]),
    ],
)
def test_forms(function: Callable[[torch.Tensor], torch.Tensor], forms: list[str]) -> None:
    found = trace(lambda y: function(y), [x(6)], 512)
    expected = {tokens: computed(found, tokens) for tokens in (2, 6, 31)}
    assert IN_PLACE(found.graph, CONTEXT) == len(forms)
    assert in_place_ops(found.graph) == forms
    found.graph.lint()
    for tokens, wanted in expected.items():
        assert torch.equal(computed(found, tokens), wanted)
    assert IN_PLACE(found.graph, CONTEXT) == 0


@pytest.mark.parametrize(
    "function",
    [
        lambda y: (z := F.silu(y)).add_(1) * 3 + z,
        lambda y: (z := F.silu(y)).view(-1, 8).add_(1) * 3 + z,
        lambda y: (z := F.silu(y)).mul_(2).add_(1).mul(3) + z.sum(),
    ],
)
def test_what_the_forward_writes_over_is_read_by_its_first_name(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    found = trace(lambda y: function(y), [x(6)], 512)
    wanted = computed(found, 6)
    IN_PLACE(found.graph, CONTEXT)
    assert torch.equal(computed(found, 6), wanted)


@pytest.mark.parametrize(
    ("architecture", "scheme"), models_with([None, "static fp8", "per token int8"])
)
def test_models_compute_the_same(architecture: str, scheme: str | None) -> None:
    found = traced_model(architecture, scheme)
    expected = {tokens: run(found, tokens) for tokens in (1, 5, 18)}
    Lower(tuple(name for name in ops.TRACED if name not in ops.PRODUCTS), "cpu")(
        found.graph, CONTEXT
    )
    assert IN_PLACE(found.graph, CONTEXT) > 10
    found.graph.lint()
    found.shapes.check_guards()
    for tokens, wanted in expected.items():
        assert torch.equal(run(found, tokens), wanted)
    assert IN_PLACE(found.graph, CONTEXT) == 0


def test_sums_over_ranks_take_no_memory() -> None:
    found = traced_model("llama", None, ranks=2)

    def on_all(tokens: int) -> list[torch.Tensor]:
        with thread_ranks(2) as ranks:
            return on_ranks(ranks, lambda rank: run(found, tokens, rank))

    expected = {tokens: on_all(tokens) for tokens in (1, 5)}
    IN_PLACE(found.graph, CONTEXT)
    left = ours(found.graph)
    # What the embedding gives is masked, which leaves it to its own.
    assert left["all_reduce_"] == 2 * LAYERS and left["all_reduce"] == 1
    for tokens, wanted in expected.items():
        assert all(torch.equal(*pair) for pair in zip(on_all(tokens), wanted, strict=True))


def test_it_is_for_pieces_that_run_as_they_are() -> None:
    fusing = PassManager(PassConfig(), CpuPlatform(), fuses=True)
    assert fusing.off["in_place"] == "the compiler reuses memory itself"
    assert PassManager(PassConfig(), CpuPlatform(), fuses=False).key[-1] == "in_place"
