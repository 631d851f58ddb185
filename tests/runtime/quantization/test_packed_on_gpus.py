"""Models whose weights a GPU keeps packed compute what they do with widened weights: on a GPU for
real, elsewhere through Triton's interpreter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_models import Kind, write_gguf
from tiny_models import make_tiny_model
from triton_interpreter import DEVICE

from piecework.kernels.triton.packed_linear import PackedLinear
from piecework.runtime.loader.loader import load_model
from piecework.runtime.models.causal_lm import CausalLM
from piecework.runtime.quantization.methods import describe, linear_kinds
from piecework.runtime.quantization.on_load import COLUMNS
from tests.runtime.quantization.test_mxfp4 import make_pair

pytestmark = pytest.mark.on_gpu

HERE = torch.device(DEVICE)
KERNELS = PackedLinear(torch.float32, HERE)
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def load(path: Path, *, packed: bool = True, **settings: Any) -> CausalLM:
    kernels = KERNELS if packed else None
    return load_model(str(path), torch.float32, HERE, False, kernels, **settings)


def layer(model: CausalLM, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model.model.layers[0].mlp(x)
    return result


def inputs(columns: int) -> torch.Tensor:
    return torch.randn(5, columns, generator=torch.Generator().manual_seed(1)).to(HERE)


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0])
def test_a_gguf_file(tmp_path: Path, kind: Kind) -> None:
    """All its linear layers and its embedding stay as they are stored, experts too."""
    folder = make_tiny_model(tmp_path / "folder", "qwen3_moe", num_hidden_layers=1, **MOE)
    path = tmp_path / "model.gguf"
    write_gguf(folder, path, "qwen3moe", kind)
    ours, wide = load(path, quantization="auto"), load(path, packed=False)
    kinds = linear_kinds(ours)
    assert {"lm_head", "model.embed_tokens", "model.layers.0.self_attn.qkv_proj"} <= set(kinds)
    assert kinds["model.layers.0.mlp.experts.gate_up_proj"] == kind.name
    x = inputs(ours.config.hidden_size)
    torch.testing.assert_close(layer(ours, x), layer(wide, x), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(ours.lm_head(x), wide.lm_head(x), rtol=1e-3, atol=1e-4)
    ids = torch.tensor([3, 7, 0], device=HERE)
    torch.testing.assert_close(ours.model.embed_tokens(ids), wide.model.embed_tokens(ids))


def test_mxfp4_experts(tmp_path: Path) -> None:
    numbers, stored = make_pair(tmp_path)
    ours, wide = load(stored, quantization="auto"), load(numbers)
    assert ours.model.layers[0].mlp.experts.gate_up_proj.weight.dtype == torch.uint8
    x = inputs(64)
    torch.testing.assert_close(layer(ours, x), layer(wide, x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("quantization", COLUMNS)
def test_experts_that_are_quantised_on_load(tmp_path: Path, quantization: str) -> None:
    folder = make_tiny_model(tmp_path / "folder", "qwen3_moe", num_hidden_layers=1, **MOE)
    ours, exact = load(folder, quantization=quantization), load(folder)
    experts = ours.model.layers[0].mlp.experts
    assert experts.gate_up_proj.op is KERNELS.experts_op
    assert (
        experts.gate_up_proj.weight.nbytes
        < exact.model.layers[0].mlp.experts.gate_up_proj.weight.nbytes / 2
    )
    assert describe(ours)
    x = inputs(ours.config.hidden_size)
    with_experts, wanted = layer(ours, x).flatten(), layer(exact, x).flatten()
    assert torch.cosine_similarity(with_experts, wanted, dim=0) > 0.98
