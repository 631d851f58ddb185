"""Each architecture's forward in pieces: few of them however deep it is, and the same logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sparse import sparse
from tiny_models import make_tiny_model

from piecework.compilation.cache import CompileCache
from piecework.compilation.compiler import EagerCompiler
from piecework.compilation.piece_maker import PieceMaker
from piecework.compilation.piecewise import PiecewiseForward
from piecework.kernels.cpu.platform import CpuPlatform
from piecework.runtime.config.model_registry import ModelCode
from piecework.runtime.graphs.compile_pieces import make_pieces
from piecework.runtime.layers.attention import register_attention
from tests.runtime.models.variants import FALLBACKS, OTHERS, VARIANTS
from tests.split_models import answer, assert_alike, load

TEXTS = [*FALLBACKS, *(name for name, (_, how) in OTHERS.items() if "text_config" not in how)]
MOST = 7
LAYERS = 7


@pytest.mark.parametrize(
    "name",
    sparse(TEXTS, kept=["gemma3"]),
)
def test_pieces_are_few_and_say_the_same(name: str, tmp_path: Path) -> None:
    architecture, overrides = VARIANTS[name]
    deeper: dict[str, Any] = {"num_hidden_layers": LAYERS}
    for member in (
        "layer_types",
        "layers_block_type",
        "activation_sparsity_pattern",
        "indexer_types",
    ):
        if kinds := overrides.get(member):
            deeper[member] = (kinds * LAYERS)[:LAYERS]
    if "attention_types" in overrides:
        deeper["attention_types"] = [[["local"], LAYERS - 1], [["global"], 1]]
    path = make_tiny_model(tmp_path / "model", architecture, **{**overrides, **deeper})
    torch._dynamo.reset()
    register_attention("CPU")
    model = load(path, code=ModelCode("auto"))
    maker = PieceMaker(
        platform=CpuPlatform(),
        compiler=EagerCompiler(),
        cache=CompileCache(tmp_path / "cache"),
        max_tokens=64,
    )
    made = make_pieces(maker, model, model.config, torch.float32)
    assert isinstance(made.forward, PiecewiseForward)
    assert len(made.forward.plan.pieces) <= MOST
    assert_alike(answer(model, forward=made.forward, steps=1), answer(model, steps=1))
