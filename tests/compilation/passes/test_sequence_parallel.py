"""Norms of a rank's own rows: how often it is found, what is sent and how much of it, that the
numbers stay, and which numbers of tokens the forward is good for.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from quantized_models import CONTEXT, LAYERS, ours, run, traced_model
from sparse import sparse

from piecework.compilation.pass_manager import PassManager
from piecework.compilation.passes.common.sequence_parallel import SequenceParallel
from piecework.compilation.passes.config import PassConfig
from piecework.compilation.torch_private import Trace
from piecework.kernels.cpu.platform import CpuPlatform
from piecework.kernels.platform.compilation import Compilation
from tests.thread_ranks import on_ranks, thread_ranks

CASES = [
    ("llama", None, 2),
    ("qwen3", "per token int8", 2),
    ("llama", "static fp8", 4),
    ("qwen3", None, 4),
]
SUMS = 2 * LAYERS + 1


def manager(ranks: int, **wishes: Any) -> PassManager:
    wished = PassConfig(**dict.fromkeys(("sequence_parallel", "norm_quant"), True) | wishes)
    return PassManager(wished, CpuPlatform(), fuses=True, ranks=ranks, long=True)


def on_all(found: Trace, tokens: int, size: int) -> tuple[list[torch.Tensor], Counter[str]]:
    with thread_ranks(size) as ranks:
        results = on_ranks(ranks, lambda rank: run(found, tokens, rank))
        return results, Counter(ranks.calls)


@pytest.mark.parametrize(
    ("architecture", "scheme", "ranks", "lowered"),
    sparse(
        [(*case, lowered) for case in CASES for lowered in (True, False)],
        kept=[(*CASES[1], True), (*CASES[2], False)],
    ),
)
def test_every_sum_is_split_until_the_norm_behind_it(
    architecture: str, scheme: str | None, ranks: int, lowered: bool
) -> None:
    found = traced_model(architecture, scheme, ranks=ranks)
    before = {tokens: on_all(found, tokens, ranks)[0] for tokens in (2 * ranks, 6 * ranks)}
    passes = manager(ranks, lower=lowered)
    assert passes.unit == ranks
    assert passes.run(found.graph, CONTEXT)["sequence_parallel"] == SUMS
    found.shapes.check_guards()

    left = ours(found.graph)
    assert left["all_reduce"] == 0 and left["reduce_scatter"] == SUMS
    # Numbers of 8 bits are gathered, and a scale for each row where a row has its own.
    scales = 2 * LAYERS if scheme is not None and "static" not in scheme else 0
    assert left["all_gather"] == SUMS + scales
    for tokens, expected in before.items():
        results, calls = on_all(found, tokens, ranks)
        assert calls == {"reduce_scatter": SUMS, "all_gather": SUMS + scales}
        for result in results:
            assert torch.equal(result, expected[0])
    assert SequenceParallel(ranks)(found.graph, CONTEXT) == 0


def test_what_is_gathered_behind_a_quantised_norm_has_8_bits() -> None:
    found = traced_model("llama", "static int8", ranks=2)
    # Not even where norm and quantisation have stayed two ops.
    manager(2, norm_quant=False, lower=False).run(found.graph, CONTEXT)
    gathers = [node for node in found.graph.nodes if "all_gather" in str(node.target)]
    dtypes = [node.meta["example_value"].dtype for node in gathers]
    assert dtypes == [torch.int8] * (2 * LAYERS) + [torch.bfloat16]


def test_a_residual_that_is_not_split_keeps_its_sums_whole() -> None:
    graph = traced_model("llama", None, ranks=2).graph
    first: Any = next(node for node in graph.nodes if "all_reduce" in str(node.target))
    first.replace_all_uses_with(first.args[0])
    graph.erase_node(first)
    before = ours(graph)
    assert SequenceParallel(2)(graph, CONTEXT) == 0 and ours(graph) == before


def test_only_a_forward_of_long_steps_on_several_ranks_splits_rows() -> None:
    class Gains(Compilation):
        device_type = "cpu"

        def sequence_parallel_obstacle(self) -> str | None:
            return None

    def made(ranks: int, *, long: bool) -> PassManager:
        # Which has a kernel only where another test has registered it.
        config = PassConfig(allreduce_norm=False)
        return PassManager(config, Gains(), fuses=True, ranks=ranks, long=long)

    assert "sequence_parallel 2" in made(2, long=True).key
    assert made(2, long=True).key != made(4, long=True).key
    for other in (made(1, long=True), made(2, long=False)):
        assert "sequence_parallel" in other.off and other.unit == 1
    assert made(2, long=False).key == made(1, long=False).key
