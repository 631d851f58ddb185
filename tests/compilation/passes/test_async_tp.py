"""Products that meet a collective: how often each pair is found, that the numbers stay, and which
group computes both at once.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from quantized_models import CONTEXT, LAYERS, ours, run, traced_model

from piecework.compilation.pass_manager import PassManager
from piecework.compilation.passes.common.async_tp import AsyncTp
from piecework.compilation.passes.config import PassConfig
from piecework.compilation.sent import bytes_sent
from piecework.kernels import collectives
from piecework.kernels.cpu.native.linear import native_linear
from piecework.kernels.cpu.platform import CpuPlatform
from tests.thread_ranks import ThreadRanks, on_ranks, thread_ranks

RANKS = 2
CASES = [("llama", None), ("qwen3", "per token int8"), ("llama", "static int8")]
PASSES = PassConfig.parse("none,+norm_quant,+sequence_parallel,+async_tp")


def manager(config: PassConfig = PASSES, *, long: bool = True) -> PassManager:
    return PassManager(config, CpuPlatform(), fuses=True, ranks=RANKS, long=long)


@pytest.mark.parametrize(("architecture", "scheme"), CASES)
def test_products_take_in_what_is_sent_before_and_after_them(
    architecture: str, scheme: str | None
) -> None:
    found = traced_model(architecture, scheme, ranks=RANKS)

    def on_all(tokens: int) -> tuple[list[torch.Tensor], Counter[str]]:
        with thread_ranks(RANKS) as ranks:
            return on_ranks(ranks, lambda rank: run(found, tokens, rank)), Counter(ranks.calls)

    before = {tokens: on_all(tokens)[0] for tokens in (4, 14)}
    assert manager().run(found.graph, CONTEXT)["async_tp"] == 4 * LAYERS
    found.shapes.check_guards()
    found.graph.lint()
    left, linear = ours(found.graph), "linear" if scheme is None else "scaled_linear"
    assert left[f"all_gather_{linear}"] == left[f"{linear}_reduce_scatter"] == 2 * LAYERS
    # The embedding is no product, and nothing multiplies what the last norm gives.
    assert left["all_gather"] == left["reduce_scatter"] == 1
    scales = 2 * LAYERS if scheme == "per token int8" else 0
    for tokens, expected in before.items():
        results, calls = on_all(tokens)
        assert calls == {"reduce_scatter": 2 * LAYERS + 1, "all_gather": 2 * LAYERS + 1 + scales}
        for result in results:
            assert torch.equal(result, expected[0])
    assert AsyncTp()(found.graph, CONTEXT) == 0


def test_rows_that_others_read_too_are_gathered_by_themselves() -> None:
    graph = traced_model("llama", None, ranks=RANKS).graph
    manager(PassConfig.parse("none,+sequence_parallel")).run(graph, CONTEXT)
    gather = next(node for node in graph.nodes if "all_gather" in str(node.target))
    with graph.inserting_after(gather):
        graph.call_method("abs", (gather,))
    assert AsyncTp()(graph, CONTEXT) == 4 * LAYERS - 1


def test_without_split_rows_there_is_nothing_to_overlap() -> None:
    assert "sequence_parallel, which inserts the" in manager(long=False).off["async_tp"]
    own = manager(PassConfig())
    assert own.off["async_tp"] == "what is sent takes the cores that multiply"


def test_a_device_that_gains_by_it_takes_in_the_sum() -> None:
    found = traced_model("llama", None, ranks=RANKS)

    def on_all() -> list[torch.Tensor]:
        with thread_ranks(RANKS) as ranks:
            return on_ranks(ranks, lambda rank: run(found, 4, rank))

    expected, sent = on_all(), bytes_sent(found.graph, found.shapes, RANKS)
    assert AsyncTp(reduces=True)(found.graph, CONTEXT) == 2 * LAYERS
    left = ours(found.graph)
    assert left["linear_all_reduce"] == 2 * LAYERS and left["all_reduce"] == 1
    assert bytes_sent(found.graph, found.shapes, RANKS) == sent
    assert all(torch.equal(*pair) for pair in zip(on_all(), expected, strict=True))


class AtOnce(ThreadRanks):
    """A group that says which products it was given, and takes those of one dtype alone."""

    dtype = torch.float32

    def multiply(self, op: str, x: torch.Tensor, *rest: Any) -> torch.Tensor | None:
        if x.dtype != self.dtype:
            return None
        if self.rank == 0:
            self.calls.append(op)
        return x.new_zeros(1)


@pytest.mark.parametrize("op", ["all_gather_linear", "linear_reduce_scatter"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_group_that_does_both_at_once_is_asked(op: str, dtype: torch.dtype) -> None:
    x, weight = torch.randn(4, 8, dtype=dtype), torch.randn(6, 8, dtype=dtype)
    ranks = AtOnce(RANKS)
    collectives.set_group("own", ranks)
    try:
        call = getattr(torch.ops.piecework, op)
        results = on_ranks(ranks, lambda rank: call(x, weight, None, "own", RANKS))
    finally:
        collectives.set_group("own", None)
    if dtype is torch.float32:
        assert ranks.calls == [op]
        return
    product = torch.nn.functional.linear(x, weight)
    for rank, result in enumerate(results):
        if op == "all_gather_linear":
            assert torch.equal(result, torch.cat([product] * RANKS))
        else:
            assert torch.equal(result, (product + product).chunk(RANKS)[rank])


@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.skipif(native_linear() is None, reason="no CPU kernels")
def test_packed_products_are_those_of_their_parts(by_row: bool) -> None:
    kernels = native_linear()
    assert kernels is not None
    weight = torch.randint(-9, 9, (64, 32), dtype=torch.int8)
    packed = kernels.pack("int8", [weight], [torch.rand(64, 1)])
    layout, x = kernels.layout("int8", 32), torch.randint(-9, 9, (8, 32), dtype=torch.int8)
    scale = torch.rand(8, 1) if by_row else torch.rand(1)
    whole = kernels.scaled_op(x, scale, packed, None, 64, layout)
    ours = torch.ops.piecework

    def fused(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = slice(4 * rank, 4 * rank + 4)
        own = scale[rows] if by_row else scale
        rest = (packed, None, 64, layout, "own", RANKS)
        return (
            ours.all_gather_native_scaled_linear(x[rows], own, *rest),
            ours.native_scaled_linear_reduce_scatter(x, scale, *rest),
        )

    ranks = ThreadRanks(RANKS)
    collectives.set_group("own", ranks)
    try:
        results = on_ranks(ranks, fused)
    finally:
        collectives.set_group("own", None)
    for rank, (gathered, scattered) in enumerate(results):
        assert torch.equal(gathered, whole)
        assert torch.equal(scattered, (whole + whole).chunk(RANKS)[rank])
