"""Triton's filtered sampling draws the tokens of its meaning in plain torch: on a GPU for real,
elsewhere through the interpreter.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_interpreter import DEVICE

from piecework.kernels import ops, reference
from piecework.kernels.triton import ops as triton_ops
from piecework.kernels.triton.sampling import sample_filtered

Arguments = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def arguments(
    probs: torch.Tensor, filters: list[tuple[int, float, float]], seed: int = 0
) -> Arguments:
    """`filters`: (top_k, top_p, min_p) of each row, top_k 0 for off."""
    top_k, top_p, min_p = zip(*filters, strict=True)
    uniform = torch.rand(
        len(filters), generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    columns = (
        torch.tensor([k or probs.shape[1] for k in top_k]),
        torch.tensor(top_p),
        torch.tensor(min_p),
        uniform,
    )
    return probs.to(DEVICE), *(column.to(DEVICE) for column in columns)


def random_probs(rows: int, vocab: int, scale: float, seed: int) -> torch.Tensor:
    """With equals among them, as logits that were bfloat16 have."""
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale
    return logits.bfloat16().float().softmax(-1)


FILTERS = st.tuples(
    st.sampled_from([0, 1, 2, 7, 60, 100_000]),
    st.sampled_from([1.0, 0.95, 0.5, 1e-9, 1e-50]),
    st.sampled_from([0.0, 0.1, 1e-4, 1.0]),
)


@settings(max_examples=examples(7, exploring=10), deadline=None)
@given(
    filters=st.lists(FILTERS, min_size=1, max_size=3),
    vocab=st.sampled_from([1, 7, 64, 197]),
    scale=st.sampled_from([0.0, 0.1, 2.0, 30.0]),
    room=st.sampled_from([16, 128]),
    seed=st.integers(0, 1000),
)
def test_it_draws_what_plain_torch_draws(
    filters: list[tuple[int, float, float]], vocab: int, scale: float, room: int, seed: int
) -> None:
    """Peaked rows and flat ones, that fit the room for candidates and that do not, with every
    filter and none.
    """
    filters = [(min(k, vocab), p, m) for k, p, m in filters]
    given = arguments(random_probs(len(filters), vocab, scale, seed), filters, seed)
    assert torch.equal(
        sample_filtered(*given, room=room, block=64), reference.sample_filtered(*given)
    )


@pytest.mark.parametrize("vocab", [pytest.param(49152, marks=pytest.mark.slow), 151936 // 2 - 1])
def test_vocabularies_of_real_models(vocab: int) -> None:
    """The sizes that a GPU gets: rows that keep few tokens, and one so flat that it is searched
    whole.
    """
    filters = [(50, 0.9, 0.0), (0, 0.95, 0.0), (0, 1.0, 0.05), (0, 0.5, 0.0)]
    probs = torch.cat([random_probs(3, vocab, 4.0, 1), random_probs(1, vocab, 0.0, 1)])
    given = arguments(probs, filters)
    # Where nothing is a processor's own memory, large tiles are quicker.
    block = 4096 if DEVICE == "cuda" else 1 << 17
    assert torch.equal(sample_filtered(*given, block=block), reference.sample_filtered(*given))


def test_every_uniform_number_of_a_grid_draws_its_share() -> None:
    """Of equals too: with eight alike and top-k 5, each of the five lowest ids is drawn a fifth of
    the time.
    """
    grid = torch.arange(10, dtype=torch.float64) / 10
    columns = (torch.full((10,), 5), torch.full((10,), 1.0), torch.zeros(10), grid)
    drawn = sample_filtered(
        *(column.to(DEVICE) for column in (torch.full((10, 8), 0.125), *columns)), room=16, block=16
    )
    assert drawn.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_rows_may_lie_apart() -> None:
    probs = random_probs(2, 50, 2.0, 3)
    given = arguments(probs, [(3, 1.0, 0.0), (0, 0.8, 0.0)])
    wide = torch.full((2, 64), float("nan"), device=DEVICE)
    wide[:, :50] = given[0]
    assert torch.equal(
        sample_filtered(wide[:, :50], *given[1:], room=16, block=64),
        sample_filtered(*given, room=16, block=64),
    )


def test_a_row_of_nan_still_gives_a_token_of_the_vocabulary() -> None:
    """What a broken model says must not make the device read or write where it should not."""
    given = arguments(torch.full((1, 40), float("nan")), [(0, 0.9, 0.0)])
    assert 0 <= int(sample_filtered(*given, room=16, block=64)) < 40


def test_the_layers_ops_take_it_where_triton_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_versions", {DEVICE: triton_ops})
    monkeypatch.setattr(reference, "sample_filtered", None)
    given = arguments(random_probs(1, 50, 2.0, 3), [(3, 0.9, 0.0)])
    assert 0 <= int(ops.sample_filtered(*given)) < 50


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no NVIDIA GPU")
@pytest.mark.parametrize("vocab", [49152, 128256, 151936])
def test_it_does_so_for_many_rows_and_never_waits(vocab: int) -> None:
    filters = list(itertools.product([0, 1, 50, 5000], [1.0, 0.95, 0.3], [0.0, 0.05])) * 4
    for scale in (0.0, 0.5, 4.0):
        given = arguments(random_probs(len(filters), vocab, scale, 5), filters)
        torch.cuda.set_sync_debug_mode("error")
        try:
            drawn = sample_filtered(*given)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(drawn, reference.sample_filtered(*given))
