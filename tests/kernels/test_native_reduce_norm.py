"""all_reduce, add, norm and quantisation in one pass over shared memory are the group's all_reduce
and the native kernels', whatever else the kernels do not know.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shared_ranks import at_once, shared_groups

from piecework.kernels import reference
from piecework.kernels.cpu.native import quantize, shared
from piecework.kernels.fused_collectives import NORMS, FusesNorms

EPS = 1e-5


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16() * 3


def same(x: torch.Tensor) -> torch.Tensor:
    """To be compared by its bits."""
    return x.contiguous().view(torch.uint8)


def arguments(norm: str, columns: int, dtype: torch.dtype, group: int) -> tuple[Any, ...]:
    weight = random(7, columns).abs()
    if norm.endswith("static"):
        return weight, EPS, torch.tensor([0.03]), dtype
    return (weight, EPS, group, dtype) if norm.endswith("dynamic") else (weight, EPS)


@settings(
    max_examples=examples(10, exploring=25),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    # CPUs do not quantise to 4 bits.
    norm=st.sampled_from([norm for norm in NORMS if not norm.endswith("fp4")]),
    size=st.integers(2, 4),
    rows=st.integers(1, 40) | st.just(300),
    groups_of=st.sampled_from([(1, 1), (3, 8), (2, 64), (1, 200)]),
    dtype=st.sampled_from([torch.int8, torch.float8_e4m3fn]),
    seed=st.integers(0, 2**31),
)
def test_every_rank_gets_what_one_after_the_other_gives(
    norm: str,
    size: int,
    rows: int,
    groups_of: tuple[int, int],
    dtype: torch.dtype,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Slots of a few rows.
    monkeypatch.setattr(shared, "SLOT_BYTES", 4096)
    columns = groups_of[0] * groups_of[1]
    xs = [random(seed + rank, rows, columns) for rank in range(size)]
    residual, rest = random(seed - 1, rows, columns), arguments(norm, columns, dtype, groups_of[1])
    groups = shared_groups(size)
    found = at_once(
        size, lambda rank: groups[rank].all_reduce_norm(norm, xs[rank], residual, *rest)
    )
    summed = at_once(size, lambda rank: groups[rank].all_reduce(xs[rank]))[0]
    # The native norm, where there is one: a plain norm differs by the order of its sum.
    module = reference if norm == "add_rms_norm" else quantize
    expected = getattr(module, norm)(summed, residual, *rest)
    for result in found:
        assert result is not None and len(result) == len(expected)
        for one, other, first in zip(result, expected, found[0], strict=True):
            assert torch.equal(same(one), same(first))
            if norm == "add_rms_norm":
                torch.testing.assert_close(one, other, rtol=2**-6, atol=1e-6)
            else:
                assert torch.equal(same(one), same(other))
        assert torch.equal(result[-1], expected[-1])


def test_what_it_does_not_know_is_left_to_others_on_every_rank() -> None:
    groups = shared_groups(3)
    assert isinstance(groups[0], FusesNorms)
    x, weight = random(1, 4, 8), random(2, 8)
    for norm, *tensors in (
        ("add_rms_norm", x.float(), x.float(), weight.float(), EPS),
        ("add_rms_norm", x, x, weight.float(), EPS),
        ("add_rms_norm", x.T, x.T, random(2, 4), EPS),
        ("add_rms_norm_quantize_dynamic", x, x, weight, EPS, 3, torch.int8),
        ("add_rms_norm_quantize_static", x, x, weight, EPS, torch.ones(1), torch.float8_e5m2),
    ):
        for group in groups:
            assert group.all_reduce_norm(norm, *tensors) is None
    assert "nothing yet" in groups[0].last_calls()[0]
