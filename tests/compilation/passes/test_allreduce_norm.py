"""all_reduce and the norm that follows as one op: how often it is found, that the numbers stay, and
which group computes it at once.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quantized_models import CONTEXT, LAYERS, ours, quantiser, run, traced_model
from sparse import sparse

from piecework.compilation.pass_manager import PassManager
from piecework.compilation.passes.config import PassConfig
from piecework.compilation.torch_private import Trace
from piecework.kernels import collectives, reference
from piecework.kernels.cpu.platform import CpuPlatform
from piecework.kernels.platform.compilation import Compilation
from tests.thread_ranks import ThreadRanks, on_ranks, thread_ranks

RANKS = 2
CASES = [("llama", None), ("qwen3", "per token int8"), ("llama", "static fp8"), ("llama", "fp4")]
PASSES = PassConfig.parse("none,+norm_quant,+allreduce_norm")


def on_all(found: Trace, tokens: int) -> tuple[list[torch.Tensor], list[str]]:
    """What each rank's forward gives, and the collectives that ran."""
    with thread_ranks(RANKS) as ranks:
        return on_ranks(ranks, lambda rank: run(found, tokens, rank)), ranks.calls


@pytest.mark.parametrize(("architecture", "scheme"), sparse(CASES, kept=CASES[:2]))
def test_every_norm_behind_an_all_reduce_takes_it_in(architecture: str, scheme: str | None) -> None:
    found = traced_model(architecture, scheme, ranks=RANKS)
    before = {tokens: on_all(found, tokens) for tokens in (1, 7)}
    manager = PassManager(PASSES, CpuPlatform(), fuses=True, ranks=RANKS)
    assert manager.run(found.graph, CONTEXT)["allreduce_norm"] == 2 * LAYERS
    found.shapes.check_guards()

    left = ours(found.graph)
    # Behind the embedding there is nothing to add; the last norm is not quantised.
    assert left["all_reduce"] == 1 and left["add_rms_norm"] == 0
    plain = 2 * LAYERS if scheme is None else 1
    assert left["all_reduce_add_rms_norm"] == plain
    kind = "" if scheme is None else quantiser(scheme)
    assert left[f"all_reduce_add_rms_norm_quantize_{kind}"] == 2 * LAYERS - plain
    for tokens, (expected, calls) in before.items():
        results, calls_now = on_all(found, tokens)
        assert calls_now == calls == ["all_reduce"] * (2 * LAYERS + 1)
        assert expected[0].isfinite().all() and torch.equal(expected[0], expected[1])
        for result in results:
            assert torch.equal(result, expected[0])
    assert manager.run(found.graph, CONTEXT)["allreduce_norm"] == 0


@pytest.mark.parametrize("place", ["residual", "another op"])
def test_a_sum_that_something_else_needs_stays(place: str) -> None:
    graph = traced_model("llama", None, ranks=RANKS).graph
    norm = next(node for node in graph.nodes if "add_rms_norm" in str(node.target))
    reduced: Any = norm.args[0]
    if place == "residual":
        norm.args = (norm.args[1], reduced, *norm.args[2:])
    else:
        with graph.inserting_before(norm):
            graph.call_method("abs", (reduced,))
    manager = PassManager(PASSES, CpuPlatform(), fuses=True, ranks=RANKS)
    assert manager.run(graph, CONTEXT)["allreduce_norm"] == 2 * LAYERS - 1


class AtOnce(ThreadRanks):
    """A group that says which norms it was given, and takes those of one dtype alone."""

    dtype = torch.float32

    def all_reduce_norm(
        self, norm: str, x: torch.Tensor, residual: torch.Tensor, *rest: Any
    ) -> tuple[torch.Tensor, ...] | None:
        if x.dtype != self.dtype:
            return None
        total = self.all_reduce(x)
        if self.rank == 0:
            self.calls.append(norm)
        result: tuple[torch.Tensor, ...] = getattr(reference, norm)(total, residual, *rest)
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_group_that_does_it_at_once_is_asked(dtype: torch.dtype) -> None:
    op = torch.ops.piecework.all_reduce_add_rms_norm_quantize_dynamic
    x, residual, weight = (
        torch.randn(3, 8, dtype=dtype),
        torch.randn(3, 8, dtype=dtype),
        torch.ones(8, dtype=dtype),
    )
    expected = reference.add_rms_norm_quantize_dynamic(x + x, residual, weight, 1e-5, 4, torch.int8)
    ranks = AtOnce(RANKS)
    collectives.set_group("own", ranks)
    try:
        results = on_ranks(ranks, lambda rank: op(x, residual, weight, 1e-5, 4, torch.int8, "own"))
    finally:
        collectives.set_group("own", None)
    for result in results:
        for one, other in zip(result, expected, strict=True):
            assert torch.equal(one, other)
    at_once = ["add_rms_norm_quantize_dynamic"] if dtype is torch.float32 else []
    assert ranks.calls == ["all_reduce", *at_once]


def test_by_itself_it_runs_where_the_device_gains_and_says_why_not() -> None:
    class Gains(Compilation):
        device_type = "cpu"

        def allreduce_norm_dtypes(self) -> tuple[torch.dtype, ...]:
            return (torch.float16,)

        def allreduce_norm_obstacle(self, ranks: int) -> str | None:
            return None

    class Not(Compilation):
        device_type = "cpu"

    taken, left = (
        PassManager(PassConfig(), each(), fuses=True, ranks=RANKS) for each in (Gains, Not)
    )
    assert "allreduce_norm (torch.float16,)" in taken.key
    assert left.off["allreduce_norm"] == "no gain was measured on cpu"
    asked = PassManager(PassConfig(allreduce_norm=True), Not(), fuses=True, ranks=RANKS)
    assert "allreduce_norm None" in asked.key
    graph = traced_model("llama", None, ranks=RANKS).graph
    assert taken.run(graph, CONTEXT)["allreduce_norm"] == 0
    alone = PassManager(PassConfig(allreduce_norm=True), Gains(), fuses=True)
    assert "one rank" in alone.off["allreduce_norm"]
