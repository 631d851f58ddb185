"""Ops of ours are nodes of a traced forward until the last pass, and then what they are defined
as.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import fx, nn

from piecework.compilation.core.errors import TraceError
from piecework.compilation.pass_manager import PassManager
from piecework.compilation.passes.common.lower import Lower
from piecework.compilation.passes.config import PassConfig
from piecework.compilation.passes.context import PassContext
from piecework.compilation.torch_private import Trace, trace
from piecework.kernels import ops, reference
from piecework.kernels.cpu.platform import CpuPlatform
from piecework.kernels.platform.compilation import Compilation

SIZE = 16
NOTHING_KNOWN = PassContext(frozenset())
DEFINITIONS = {
    "rms_norm": ["rms_norm", "mul"],
    "add_rms_norm": ["add", "rms_norm", "mul"],
    "silu_and_mul": ["chunk", "silu", "mul"],
    "rotary_embedding": ["mul", "roll", "mul", "add"],
}
"""What each becomes."""


class Block(nn.Module):
    """Each op once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.table = nn.Parameter(torch.randn(32, 4 * SIZE), requires_grad=False)
        self.weight = nn.Parameter(torch.randn(SIZE), requires_grad=False)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        heads = self.table[input_ids].view(-1, 4, SIZE)[:, :2]
        angles = self.table[positions][:, None, :SIZE]
        rotated = ops.rotary_embedding(ops.rms_norm(heads, self.weight, 1e-5), angles, -angles)
        gated = ops.silu_and_mul(rotated.flatten(1))
        normed, total = ops.add_rms_norm(gated, gated + 1, self.weight, 1e-5)
        return normed + total


class Fusing(Compilation):
    """A device whose compiler may fuse what ops mean."""

    device_type = "cpu"


def inputs(tokens: int) -> list[torch.Tensor]:
    return [torch.arange(tokens) % 32, torch.arange(tokens) * 3 % 32]


def traced() -> Trace:
    return trace(Block().forward, inputs(6), 512)


def names(graph: fx.Graph) -> Counter[str]:
    """What is computed, by short names; taking a tuple's parts is not."""
    found = [getattr(node.target, "__name__", str(node.target)) for node in graph.nodes]
    return Counter(name for name in found if name != "getitem")


def ours(graph: fx.Graph) -> list[str]:
    found = [str(node.target) for node in graph.nodes]
    return [name.split(".")[1] for name in found if name.startswith("piecework.")]


def test_a_forward_is_traced_with_its_ops_whole() -> None:
    assert sorted(ours(traced().graph)) == sorted(DEFINITIONS)
    assert set(ops.TRACED) >= set(DEFINITIONS)


def test_a_compiler_that_fuses_sees_plain_torch_and_the_same_results() -> None:
    found = traced()
    matches = PassManager(PassConfig(), Fusing(), fuses=True).run(found.graph, NOTHING_KNOWN)
    found.shapes.check_guards()
    assert matches["lower"] == len(DEFINITIONS) and ours(found.graph) == []
    assert all(
        "example_value" in node.meta for node in found.graph.nodes if node.op.startswith("call")
    )


@pytest.mark.parametrize("op", DEFINITIONS)
def test_an_op_becomes_its_definition_and_the_others_stay(op: str) -> None:
    before, found = traced().graph, traced().graph
    assert Lower((op,), "cpu")(found, NOTHING_KNOWN) == 1
    assert sorted(ours(found)) == sorted(set(DEFINITIONS) - {op})
    assert names(found) - names(before) == Counter(DEFINITIONS[op])


class GroupedExperts(nn.Module):
    """The choice of a router whose experts lie in groups."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.table = nn.Parameter(torch.randn(32, SIZE), requires_grad=False)
        self.correction = nn.Parameter(torch.randn(SIZE), requires_grad=False)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        logits = self.table[input_ids] + positions[:, None]
        return torch.cat(
            ops.choose_experts(logits, self.correction, 3, True, True, 4, 2, 2, 2.5, 1e-20), -1
        )


def test_so_does_the_choice_of_experts_in_groups() -> None:
    model = GroupedExperts()
    found = trace(model.forward, inputs(6), 512)
    assert Lower(("choose_experts",), "cpu")(found.graph, NOTHING_KNOWN) == 1
    assert ours(found.graph) == []
    found.shapes.check_guards()


def test_the_results_are_those_of_the_model() -> None:
    for lowered in ((), tuple(DEFINITIONS), ("add_rms_norm",)):
        found = traced()
        Lower(lowered, "cpu")(found.graph, NOTHING_KNOWN)
        for tokens in (2, 6, 33):
            assert torch.equal(bound(found, tokens), Block()(*inputs(tokens)))


def bound(found: Trace, tokens: int) -> torch.Tensor:
    """The traced forward on other tokens."""
    block, taken = Block(), iter(inputs(tokens))
    values: list[Any] = []
    for value in found.values:
        if not isinstance(value, torch.Tensor):
            values.append(tokens)
        elif value.dtype is torch.int64:
            values.append(next(taken))
        else:
            values.append(block.table if value.dim() == 2 else block.weight)
    (result,) = fx.GraphModule(nn.Module(), found.graph)(*values)
    return result


def test_a_device_s_own_kernels_stay_for_a_compiler_that_fuses_nothing() -> None:
    class Own:
        rms_norm = staticmethod(lambda x, weight, eps: reference.rms_norm(x, weight, eps))

    config, platform = PassConfig(), Fusing()
    all_lowered = PassManager(config, platform, fuses=True)
    before = PassManager(config, platform, fuses=False)
    ops.register("cpu", Own())
    own, fused = (PassManager(config, platform, fuses=fuses) for fuses in (False, True))
    keys = [
        next(key for key in manager.key if key.startswith("lower"))
        for manager in (before, all_lowered, fused, own)
    ]
    assert keys[0] == keys[1] == keys[2] != keys[3]
    graph = traced().graph
    own.run(graph, NOTHING_KNOWN)
    assert ours(graph) == ["rms_norm"]


def test_no_op_is_lowered_where_pieces_keep_the_bits_of_single_ops() -> None:
    graph = traced().graph
    before = ours(graph)
    PassManager(PassConfig(), CpuPlatform(), fuses=True).run(graph, NOTHING_KNOWN)
    assert ours(graph) == before


def test_a_definition_of_another_layout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        reference, "silu_and_mul", lambda x: (x.chunk(2, -1)[0].t().contiguous()).t()
    )
    with pytest.raises(TraceError, match="silu_and_mul"):
        Lower(("silu_and_mul",), "cpu")(traced().graph, NOTHING_KNOWN)
