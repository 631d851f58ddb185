"""Numbers of experts that no model has are refused before a list is made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_models import make_tiny_model

from piecework.kernels import reference
from piecework.runtime.layers.moe import Router, Routing
from piecework.runtime.loader.loader import load_model
from piecework.runtime.quantization.unquantized import Unquantized

SHAPE = {"moe_intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "too many": ({"num_local_experts": 10**12}, "has 1000000000000 experts, but at most 4096"),
    "more a token than there are": (
        {"num_experts_per_tok": 5},
        "num_experts_per_tok is 5",
    ),
    "none a token": ({"num_experts_per_tok": 0}, "num_experts_per_tok is 0"),
    "no columns": ({"moe_intermediate_size": 0}, "moe_intermediate_size is 0"),
    "no number": ({"num_local_experts": "4"}, "num_local_experts must be a whole number"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experts")
    return make_tiny_model(path, "qwen3_moe", num_hidden_layers=1, **SHAPE)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_numbers_are_one_line(folder: Path, tmp_path: Path, name: str) -> None:
    changes, line = WRONG[name]
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match=line):
        load_model(str(tmp_path), torch.float32, torch.device("cpu"), False)


def test_weights_are_divided_by_their_sum_and_the_least_of_it() -> None:
    """LFM2-MoE's is so large that experts which all score next to nothing give next to nothing."""
    torch.manual_seed(0)
    x, weight = torch.randn(3, 8), torch.randn(4, 8)
    for least, total in ((1e-20, 1.0), (1e-6, 0.0)):
        router = Router(8, Routing(4, 2, "sigmoid", least_sum=least))
        router.method = Unquantized()
        router.method.create(router)
        router.weight.data, router.bias = weight, torch.full((4,), -28.0)
        _, weights = router.choose(x)
        torch.testing.assert_close(weights.sum(-1), torch.full((3,), total), atol=1e-3, rtol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_may_be_of_any_width(dtype: torch.dtype) -> None:
    """torch's product of groups takes rows of whole 16 bytes alone."""
    tokens, experts, hidden, size = 5, 3, 26, 7
    torch.manual_seed(0)
    x = torch.randn(tokens, hidden, dtype=dtype)
    gate_up = torch.randn(experts * 2 * size, hidden, dtype=dtype) / 8
    down = torch.randn(experts * hidden, size, dtype=dtype) / 8
    ids = torch.tensor([[2], [0], [2], [1], [0]])
    weights = torch.rand(tokens, 1)
    said = reference.fused_moe(x, ids, weights, gate_up, None, down, None, 0.0, False)
    for row, expert in enumerate(ids[:, 0].tolist()):
        gate, up = gate_up.view(experts, 2, size, hidden)[expert] @ x[row]
        wanted = down.view(experts, hidden, size)[expert] @ (F.silu(gate) * up) * weights[row]
        assert torch.allclose(said[row].float(), wanted.float(), rtol=0.02, atol=0.02)
