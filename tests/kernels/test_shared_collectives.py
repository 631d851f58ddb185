"""What collectives through shared memory compute."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_variants import built, mostly_best
from shared_ranks import at_once, shared_groups

from piecework.kernels.cpu.native import build, shared

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots of which a small tensor fills many."""
    monkeypatch.setattr(shared, "SLOT_BYTES", 4096)


def numbers(size: int, *shape: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """One tensor a rank."""
    random = torch.Generator().manual_seed(seed)
    return [(30 * torch.randn(shape, generator=random)).to(dtype) for _ in range(size)]


def added_up(parts: list[torch.Tensor]) -> torch.Tensor:
    """In the order of ranks, 16 bits in float32."""
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part
    return total.to(parts[0].dtype)


@settings(max_examples=25)
@given(
    size=st.integers(2, 5),
    rows=st.integers(0, 40),
    columns=st.integers(1, 700),
    dtype=st.sampled_from(FLOATS),
    seed=st.integers(0, 2**31),
)
def test_a_sum_is_as_near_as_its_dtype_and_the_same_on_every_rank_and_again(
    size: int, rows: int, columns: int, dtype: torch.dtype, seed: int
) -> None:
    xs = numbers(size, rows, columns, dtype=dtype, seed=seed)
    groups = shared_groups(size)
    found = at_once(size, lambda rank: groups[rank].all_reduce(xs[rank]))
    again = at_once(size, lambda rank: groups[rank].all_reduce(xs[rank]))
    exact, sizes = sum(x.double() for x in xs), sum(x.double().abs() for x in xs)
    epsilon = max(torch.finfo(dtype).eps, size * torch.finfo(torch.float32).eps)
    if dtype != torch.float64:
        assert ((found[0].double() - exact).abs() <= epsilon * sizes).all()
    assert torch.equal(found[0], added_up(xs))
    assert all(torch.equal(found[0], other) for other in found + again)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.usefixtures("short_pieces")
def test_each_collective_gives_what_it_says_in_pieces_too(size: int) -> None:
    groups = shared_groups(size)
    for dtype, rows in ((torch.bfloat16, 70), (torch.int64, 33), (torch.float32, 1)):
        xs = numbers(size, size * rows, 65, dtype=dtype)
        parts = [x.chunk(size) for x in xs]

        def run(rank: int, xs: list[torch.Tensor] = xs) -> list[torch.Tensor | None]:
            group, x = groups[rank], xs[rank]
            told = x.clone()
            group.broadcast(told)
            collectives = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "gather")
            return [told, *(getattr(group, name)(x) for name in collectives)]

        for rank, found in enumerate(at_once(size, run)):
            told, reduced, gathered, scattered, exchanged, at_root = found
            assert torch.equal(told, xs[0])
            assert torch.equal(reduced, added_up(xs))
            assert torch.equal(gathered, torch.cat(xs))
            assert torch.equal(scattered, added_up([part[rank] for part in parts]))
            assert torch.equal(exchanged, torch.cat([part[rank] for part in parts]))
            assert at_root is None if rank else torch.equal(at_root, torch.cat(xs))


@pytest.mark.parametrize("variant", mostly_best())
def test_every_variant_rounds_sums_as_torch_does(variant: build.Variant) -> None:
    groups = shared_groups(2, library=built(variant))
    special = [0.0, -0.0, 6e-8, -3e-8, 65519.0, 65520.0, 1e-5, float("inf"), float("nan")]
    for dtype in (torch.bfloat16, torch.float16):
        xs = numbers(2, 1003, dtype=dtype)
        xs[0][: len(special)] = torch.tensor(special).to(dtype)
        xs[1][: len(special)] = torch.tensor([0.0, 0, 3e-8, 0, 0, 15, 6e-8, 1, 1]).to(dtype)
        first, second = at_once(2, lambda rank, xs=xs: groups[rank].all_reduce(xs[rank]))
        assert torch.equal(first.nan_to_num(nan=7), added_up(xs).nan_to_num(nan=7))
        assert torch.equal(first.nan_to_num(nan=7), second.nan_to_num(nan=7))


def test_several_threads_of_a_rank_share_its_work() -> None:
    xs = numbers(3, 300_001, dtype=torch.float32)
    groups = shared_groups(3)

    def run(rank: int) -> torch.Tensor:
        torch.set_num_threads(2)  # this thread's alone
        return groups[rank].all_reduce(xs[rank])

    assert all(torch.equal(found, added_up(xs)) for found in at_once(3, run))
