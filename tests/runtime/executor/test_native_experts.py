"""Decodes of models with experts in one native call give what the model gives op by op."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from native_steps import Case
from native_variants import native_variants
from tiny_models import make_tiny_model

from piecework.kernels.cpu.native.linear import native_linear
from piecework.kernels.cpu.native.step import is_known
from piecework.runtime.loader.loader import load_model

SHAPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "softmax": ("mixtral", "none", {"num_local_experts": 3, "num_experts_per_tok": 2}),
    "layers without experts": (
        "qwen3_moe",
        "none",
        {
            "num_experts": 4,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 64,
            "mlp_only_layers": [1],
        },
    ),
    "8 bits": ("mixtral", "int8", {"num_local_experts": 2, "num_experts_per_tok": 2}),
    "4 bits": ("mixtral", "q4_0", {"num_local_experts": 2, "num_experts_per_tok": 2}),
}


@pytest.fixture(scope="module", params=SHAPES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    architecture, quantization, overrides = SHAPES[request.param]
    path = make_tiny_model(
        tmp_path_factory.mktemp("experts"), architecture, num_hidden_layers=2, **overrides
    )
    found = Case(path, quantization)
    assert is_known(found.model, found.layouts)
    return found


@pytest.mark.parametrize(
    "lens", [[(1, 0)], [(1, 15 + 3 * i) for i in range(7)], [(1, i % 15) for i in range(64)]]
)
def test_it_is_the_forward_op_by_op(case: Case, lens: list[tuple[int, int]]) -> None:
    (eager, eager_cache), (native, cache) = (
        case.eager(lens),
        case.native(lens, native_variants()[0]),
    )
    # Where two experts are nearly alike, rounding may choose the other for a token.
    loss = (native.log_softmax(-1) - eager.log_softmax(-1)).abs().mean(-1)
    assert loss.quantile(0.9) < case.loss
    assert (cache.float() - eager_cache.float()).abs().mean() < case.loss / 30


def test_what_the_kernels_do_not_choose_by_is_refused(tmp_path: Path) -> None:
    def known(architecture: str, **overrides: Any) -> bool:
        path = make_tiny_model(
            tmp_path / str(len(list(tmp_path.iterdir()))),
            architecture,
            num_hidden_layers=1,
            **overrides,
        )
        cpu = torch.device("cpu")
        model = load_model(str(path), torch.bfloat16, cpu, False, native_linear())
        return is_known(model, model.kv_layouts(torch.bfloat16))

    assert known("mixtral", num_local_experts=2)
    # Experts would share a panel.
    assert not known("mixtral", num_local_experts=2, intermediate_size=80)
    groups = {"n_routed_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
    assert not known("glm4_moe", n_group=2, topk_group=1, first_k_dense_replace=0, **groups)
