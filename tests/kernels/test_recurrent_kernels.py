"""Layers with a recurrent state give what plain torch gives: by the C++ kernels in every variant,
and for steps by Triton's, on a GPU for real and elsewhere in its interpreter.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native_variants import built, mostly_best
from recurrent_cases import (
    SHAPES,
    assert_same_prompts,
    assert_same_scan,
    assert_same_steps,
    assert_spoils_what_follows_alone,
)

from piecework.kernels import recurrent_prompts
from piecework.kernels.cpu.native import recurrent

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
# On both sides of a chunk, and past the part of a prompt that is computed at once.
LENGTHS = (1, 2, 13, 31, 32, 33, 150, 300)
LENS = st.lists(st.sampled_from(LENGTHS), min_size=3, max_size=3)


def cases(number: int) -> settings:
    return settings(
        max_examples=number, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )


@pytest.fixture(params=mostly_best())
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(recurrent, "load_part", built(request.param).part)
    return recurrent


@DTYPES
@cases(6)
@given(**SHAPES)
def test_a_step_is_that_of_plain_torch(native: Any, dtype: torch.dtype, **shape: Any) -> None:
    assert_same_steps(native, dtype, **shape)


@pytest.mark.on_gpu
@settings(max_examples=3)
@given(**SHAPES)
def test_a_step_of_triton_is_that_of_plain_torch(**shape: Any) -> None:
    device = pytest.importorskip("triton_interpreter").DEVICE
    from piecework.kernels.triton import recurrent as triton_recurrent

    assert_same_steps(triton_recurrent, torch.float32, **shape, device=device)


@DTYPES
@cases(4)
@given(lens=LENS.filter(lambda lens: max(lens) > 1), **SHAPES)
def test_prompts_are_those_of_plain_torch(
    native: Any, dtype: torch.dtype, lens: list[int], **shape: Any
) -> None:
    assert_same_prompts(native, dtype, lens, **shape)


@DTYPES
@cases(8)
@given(
    lens=LENS | st.just([1, 1, 1]),
    heads=SHAPES["heads"],
    sizes=SHAPES["sizes"] | st.just((70, 16)),
    slots=SHAPES["slots"],
    seed=SHAPES["seed"],
)
def test_a_selective_scan_is_that_of_plain_torch(
    native: Any, dtype: torch.dtype, lens: list[int], **shape: Any
) -> None:
    assert_same_scan(native, dtype, lens, **shape)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["mamba2", "gated_delta", "delta by rows", "selective_scan"])
def test_a_broken_number_changes_nothing_before_it(native: Any, kind: str, number: float) -> None:
    assert_spoils_what_follows_alone(native, kind, number)
    assert_spoils_what_follows_alone(recurrent_prompts, kind, number)
