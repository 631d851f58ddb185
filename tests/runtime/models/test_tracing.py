"""Models can be traced: once for every number of tokens, and equal layers as equal graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_tiny_model

from piecework.kernels.cpu.platform import CpuPlatform
from piecework.runtime.cache.pool import KVPool
from piecework.runtime.core.forward_context import ForwardContext, forward_context
from piecework.runtime.layers.attention import register_attention
from piecework.runtime.loader.loader import load_model

LAYERS = 4


class MeanAttention:
    """In attention's place, and as little of it: each token's values, its queries and what is
    cached left aside.
    """

    def plan(self, metadata: Any, page_size: int) -> None:
        return None

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        *_: Any,
        **__: Any,
    ) -> None:
        out.copy_((v + k).mean(1, keepdim=True) + q)


class Traced:
    """A model's forward and the graphs that tracing it has made."""

    def __init__(self, folder: Path) -> None:
        register_attention("CPU")
        self.model = load_model(str(folder), torch.float32, torch.device("cpu"), False)
        self.graphs: list[torch.fx.Graph] = []
        self._compiled = torch.compile(self.model.forward, backend=self._keep, fullgraph=True)
        layouts = self.model.kv_layouts(torch.float32)
        pool = KVPool(layouts, num_pages=1, page_size=1, platform=CpuPlatform())
        self._context = ForwardContext(backend=MeanAttention(), plan=None, pool=pool)

    def _keep(self, module: torch.fx.GraphModule, _: list[Any]) -> Any:
        self.graphs.append(module.graph)
        return module.forward

    def results(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(traced, eager) hidden states of `tokens` tokens."""
        inputs = torch.arange(tokens) % 500, torch.arange(tokens)
        for tensor in inputs:
            torch._dynamo.mark_dynamic(tensor, 0)
        with torch.inference_mode(), forward_context(self._context):
            return self._compiled(*inputs), self.model(*inputs)


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "mistral", "qwen2")),
        "qwen3",
        "qwen3_moe",
    ],
)
def traced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Traced:
    torch._dynamo.reset()
    return Traced(
        make_tiny_model(tmp_path_factory.mktemp("model"), request.param, num_hidden_layers=LAYERS)
    )


def test_one_graph_serves_every_number_of_tokens(traced: Traced) -> None:
    for tokens in (5, 2, 33, 130):
        ours, eager = traced.results(tokens)
        assert torch.equal(ours, eager)
    assert len(traced.graphs) == 1


def pieces(graph: torch.fx.Graph) -> list[list[tuple[Any, ...]]]:
    """What is called between two attentions, with the constants that it is called with, but no
    names.
    """
    found: list[list[tuple[Any, ...]]] = [[]]
    for node in graph.nodes:
        if node.target is torch.ops.piecework.attention:
            found.append([])
        elif node.op not in ("placeholder", "output"):
            constants = [
                argument
                for argument in torch.utils._pytree.tree_leaves((node.args, node.kwargs))
                if not is_node(argument)
            ]
            found[-1].append((node.op, node.target, *map(repr, constants)))
    return found


def is_node(argument: Any) -> bool:
    return isinstance(argument, torch.fx.Node)


def test_equal_layers_are_equal_pieces(traced: Traced) -> None:
    traced.results(7)
    first, *middle, last = pieces(traced.graphs[0])
    assert len(middle) == LAYERS - 1
    assert all(piece == middle[0] for piece in middle)
    assert first != middle[0] != last


def test_a_number_that_is_no_shape_is_a_constant(traced: Traced) -> None:
    """A number that came in from outside would have to be read from the device at every step."""
    traced.results(7)
    values = [
        node.meta["example_value"] for node in traced.graphs[0].nodes if node.op == "placeholder"
    ]
    assert all(isinstance(value, torch.SymInt) or value.ndim > 0 for value in values)
