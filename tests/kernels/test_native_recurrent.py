"""Layers with a recurrent state by the C++ kernels: what plain torch gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recurrent_cases import SHAPES, assert_same_prompts, assert_same_steps

from piecework.kernels.cpu.native import build, recurrent
from piecework.kernels.recurrent_steps import DeltaWeights, Mamba2Weights, States
from piecework.kernels.state_plan import plan_states
from tests.native_variants import native_variants


@pytest.mark.parametrize("variant", native_variants(), ids=lambda variant: variant.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@settings(deadline=None, max_examples=6)
@given(**SHAPES)
def test_a_step_is_that_of_plain_torch(
    variant: build.Variant, dtype: torch.dtype, **shape: Any
) -> None:
    library = build.load_variant(variant)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recurrent, "load_kernels", lambda: library)
        assert_same_steps(recurrent, dtype, **shape)


LENGTHS = (1, 2, 13, 31, 32, 33, 150, 300)
"""On both sides of a chunk, and past the part of a prompt that is computed at once."""


@pytest.mark.parametrize("variant", native_variants(), ids=lambda variant: variant.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@settings(deadline=None, max_examples=4)
@given(
    lens=st.lists(st.sampled_from(LENGTHS), min_size=3, max_size=3).filter(lambda n: max(n) > 1),
    **SHAPES,
)
def test_prompts_are_those_of_plain_torch(
    variant: build.Variant, dtype: torch.dtype, lens: list[int], **shape: Any
) -> None:
    library = build.load_variant(variant)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recurrent, "load_kernels", lambda: library)
        assert_same_prompts(recurrent, dtype, lens, **shape)


@pytest.mark.parametrize("is_delta", [False, True], ids=["mamba2", "gated_delta"])
@pytest.mark.parametrize("variant", native_variants(), ids=lambda variant: variant.name)
def test_a_nan_changes_nothing_before_it(variant: build.Variant, is_delta: bool) -> None:
    library, heads, size, tokens = build.load_variant(variant), 2, 16, 45
    noise = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=noise)

    x, first, second = random(tokens, 4 * size), random(tokens, heads), random(tokens, heads)
    conv, bias, a = random(4 * size, 4), random(4 * size), -random(heads).exp()
    prompts = plan_states([tokens], torch.tensor([1])).prompts
    assert prompts is not None

    def run(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(tokens, heads * size)
        states = States(torch.zeros(2, 3, 4 * size), torch.zeros(2, heads, size, size))
        if is_delta:
            weights = DeltaWeights(conv, a, bias[:heads])
            recurrent.gated_delta_prompts(x, first, second, weights, out, states, prompts)
        else:
            limits = (0.0, float("inf"))
            of_mamba = Mamba2Weights(conv, bias, a, bias[:heads], bias[:heads], limits)
            recurrent.mamba2_prompts(x, first, of_mamba, out, states, prompts)
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recurrent, "load_kernels", lambda: library)
        expected = run(x)
        for place in (1, 5, 17, 31, 40):
            broken = x.clone()
            broken[place] = float("nan")
            found = run(broken)
            assert torch.equal(found[:place], expected[:place]), place
            assert found[place].isnan().any()
