"""torchair in plain torch: its backend keeps the graphs and runs them as they are."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch


class StandIn:
    """What torchair offers, with its keyword-only signature; its backend keeps the graphs and runs
    them as they are.
    """

    def __init__(self) -> None:
        self.configs: list[Any] = []
        self.graphs: list[torch.fx.GraphModule] = []
        self.shapes: list[list[tuple[int, ...]]] = []

    def get_npu_backend(
        self, *, compiler_config: Any = None, custom_decompositions: Any = None
    ) -> Callable[..., Any]:
        self.configs.append(compiler_config)
        return self.compile

    def compile(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.graphs.append(graph)
        self.shapes.append(
            [
                tuple(value.shape)
                for value in inputs
                if isinstance(value, torch.Tensor) and value.dim() == 3
            ]
        )
        assert all(type(size) is int for shape in self.shapes[-1] for size in shape), (
            "a size that is not fixed"
        )
        return graph.forward


class CompilerConfig:
    pass


def put_in_place(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Make `import torchair` find a stand-in until the test ends."""
    stand_in = StandIn()
    modules = {
        name: ModuleType(name)
        for name in ("torchair", "torchair.configs", "torchair.configs.compiler_config")
    }
    vars(modules["torchair"])["get_npu_backend"] = stand_in.get_npu_backend
    vars(modules["torchair.configs.compiler_config"])["CompilerConfig"] = CompilerConfig
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    torch.compiler.reset()
    return stand_in
