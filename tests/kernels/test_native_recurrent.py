"""Layers with a recurrent state by the C++ kernels: what plain torch gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_variants import built, native_variants
from recurrent_cases import (
    SHAPES,
    assert_same_prompts,
    assert_same_scan,
    assert_same_steps,
    assert_spoils_what_follows_alone,
)

from piecework.kernels import recurrent_prompts
from piecework.kernels.cpu.native import build, recurrent


@pytest.mark.parametrize("variant", native_variants(), ids=lambda variant: variant.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@settings(deadline=None, max_examples=6)
@given(**SHAPES)
def test_a_step_is_that_of_plain_torch(
    variant: build.Variant, dtype: torch.dtype, **shape: Any
) -> None:
    library = built(variant)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recurrent, "load_part", library.part)
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
    library = built(variant)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recurrent, "load_part", library.part)
        assert_same_prompts(recurrent, dtype, lens, **shape)


@pytest.mark.parametrize("variant", native_variants(), ids=lambda variant: variant.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@settings(deadline=None, max_examples=8)
@given(
    lens=st.lists(st.sampled_from(LENGTHS), min_size=3, max_size=3) | st.just([1, 1, 1]),
    heads=SHAPES["heads"],
    sizes=SHAPES["sizes"] | st.just((70, 16)),
    slots=SHAPES["slots"],
    seed=SHAPES["seed"],
)
def test_a_selective_scan_is_that_of_plain_torch(
    variant: build.Variant, dtype: torch.dtype, lens: list[int], **shape: Any
) -> None:
    library = built(variant)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recurrent, "load_part", library.part)
        assert_same_scan(recurrent, dtype, lens, **shape)


BROKEN = pytest.mark.parametrize("number", [float("nan"), float("inf")])
KINDS = ("mamba2", "gated_delta", "delta by rows", "selective_scan")


@BROKEN
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", native_variants(), ids=lambda variant: variant.name)
def test_a_broken_number_changes_nothing_before_it(
    variant: build.Variant, kind: str, number: float
) -> None:
    library = built(variant)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recurrent, "load_part", library.part)
        assert_spoils_what_follows_alone(recurrent, kind, number)


@BROKEN
@pytest.mark.parametrize("kind", KINDS)
def test_nor_does_it_in_plain_torch(kind: str, number: float) -> None:
    assert_spoils_what_follows_alone(recurrent_prompts, kind, number)
