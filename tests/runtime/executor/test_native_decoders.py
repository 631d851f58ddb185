"""Decodes in one native call give what the model gives op by op, for decoders of every kind of
part.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from native_steps import Case
from native_variants import native_variants
from tiny_models import make_tiny_model

from piecework.kernels.cpu.native.linear import native_linear
from piecework.kernels.cpu.native.step import is_known, make_native_step
from piecework.runtime.layers.self_attention import SelfAttention
from piecework.runtime.loader.loader import load_model

EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "scaled embedding, gelu": ("gemma", {"head_dim": 32}),
    "norms around halves, soft caps": (
        "gemma2",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 20,
            "sliding_window": 24,
            "attn_logit_softcapping": 3.0,
        },
    ),
    "two tables": (
        "gemma3_text",
        {"head_dim": 32, "sliding_window": 24, "sliding_window_pattern": 2},
    ),
    "multipliers": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.1,
            "logits_scaling": 8.0,
        },
    ),
    "a layer without positions": ("smollm3", {"no_rope_layer_interval": 2}),
    "pairs side by side": ("glm4", {"head_dim": 32}),
    "part of a head is turned": ("phi3", {"partial_rotary_factor": 0.5}),
    "norms over all heads": ("olmo2", {}),
    "sinks and clamped gates": (
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 32,
            "sliding_window": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "a gated expert of all tokens": (
        "qwen2_moe",
        {**EXPERTS, "shared_expert_intermediate_size": 64},
    ),
    "corrected scores, an expert of all tokens": (
        "glm4_moe",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.5,
        },
    ),
}


@pytest.fixture(scope="module", params=DECODERS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    architecture, overrides = DECODERS[request.param]
    path = make_tiny_model(
        tmp_path_factory.mktemp("decoder"), architecture, num_hidden_layers=2, **overrides
    )
    found = Case(path, "none")
    for name, parameter in found.model.named_parameters():
        if name.endswith(("e_score_correction_bias", "sinks")):
            torch.nn.init.normal_(parameter, std=0.5)
    found.layouts = found.model.kv_layouts(torch.bfloat16)
    assert is_known(found.model, found.layouts)
    return found


@pytest.mark.parametrize("lens", [[(1, 30)], [(1, 15 + 3 * i) for i in range(7)]])
def test_it_is_the_forward_op_by_op(case: Case, lens: list[tuple[int, int]]) -> None:
    (eager, eager_cache), (native, cache) = (
        case.eager(lens),
        case.native(lens, native_variants()[0]),
    )
    # Where two experts are nearly alike, rounding may choose the other for a token.
    loss = (native.log_softmax(-1) - eager.log_softmax(-1)).abs().mean(-1)
    assert loss.median() < case.loss
    assert (cache.float() - eager_cache.float()).abs().mean() < case.loss / 30


def test_logits_are_finished_as_the_model_does_it(case: Case) -> None:
    """And the likeliest tokens are found with the forward where nothing is done to logits alone."""
    pool, step, rows = case.filled(), case.step([(1, 15 + 3 * i) for i in range(4)]), [3, 1]
    kernels = make_native_step(case.model, pool.layouts, pool.k, pool.v, pool.second)
    assert kernels is not None
    logits = case.model.compute_logits(kernels.call(*step).hidden())[rows]
    call = kernels.call(*step, torch.tensor(rows))
    found = call.logits()
    assert found is not None
    torch.testing.assert_close(found, logits, rtol=1e-6, atol=0.0)
    chosen = call.tokens()
    assert (chosen is None) == (case.model.step_parts().finish is not None)
    assert chosen is None or chosen == logits.argmax(-1).tolist()


def test_what_computes_otherwise_than_its_parts_say_is_refused(tmp_path: Path) -> None:
    class Other(SelfAttention):
        def forward(self, x: torch.Tensor, rotations: Any) -> torch.Tensor:
            return -super().forward(x, rotations)

    class Turning(SelfAttention):
        def turn(self, heads: torch.Tensor, rotations: Any) -> torch.Tensor:
            return heads

    path = make_tiny_model(tmp_path, num_hidden_layers=1)
    model = load_model(str(path), torch.bfloat16, torch.device("cpu"), False, native_linear())
    layouts = model.kv_layouts(torch.bfloat16)
    assert is_known(model, layouts)
    layers: Any = model.model.layers
    for kind in (Other, Turning):
        layers[0].self_attn.__class__ = kind
        assert not is_known(model, layouts)
