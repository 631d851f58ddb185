"""On an NPU torch.compile goes through torchair: called as its signature says, with fixed shapes,
for each class of blocks once.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn
from torchair_standin import CompilerConfig, StandIn

from piecework.compilation.regional import CompiledModels
from piecework.kernels.npu.platform import NpuPlatform


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


class Model(nn.Module):
    _repeated_blocks = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        for block in self.blocks:
            x = block(x)
        return x


@torch.no_grad()
def test_blocks_on_the_npu_are_compiled_by_torchair(torchair: StandIn) -> None:
    expected, model = Model(), Model().to("npu")
    compiled = CompiledModels({"transformer": model}, NpuPlatform(), regional=True)
    assert len(torchair.configs) == 1 and isinstance(torchair.configs[0], CompilerConfig)
    for length in (5, 5, 7, 7, 9):
        x = torch.randn(1, length, 8)
        assert torch.allclose(model(x.to("npu")).cpu(), expected(x), atol=1e-5)
    assert compiled.regions == {"Block": 3}
    assert torchair.shapes == [[(1, 5, 8)], [(1, 7, 8)], [(1, 9, 8)]], (
        "each shape for itself, and once for all blocks"
    )


@torch.no_grad()
def test_shapes_beyond_torch_s_limit_run_eagerly(torchair: StandIn) -> None:
    expected, model = Model(), Model().to("npu")
    compiled = CompiledModels({"transformer": model}, NpuPlatform(), regional=True)
    for length in range(2, 14):
        x = torch.randn(1, length, 8)
        assert torch.allclose(model(x.to("npu")).cpu(), expected(x), atol=1e-5)
    assert compiled.log.graphs == torch._dynamo.config.recompile_limit == 8


def test_options_are_torchair_s(torchair: StandIn) -> None:
    options = NpuPlatform().compile_options()
    assert options.backend == torchair.compile
    assert options.dynamic is False and options.fullgraph is False and options.mode is None


def test_without_torchair_it_is_said(simnpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchair", None)
    with pytest.raises(ValueError, match="needs torchair"):
        NpuPlatform().compile_options()
