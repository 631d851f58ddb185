"""Filtered sampling draws the tokens of its meaning in plain torch: by the native kernels, in every
variant that runs here, and by Triton's, on a GPU for real and elsewhere in its interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from native_variants import built, native_variants

from piecework.kernels import reference
from piecework.kernels.cpu.native import build, sampling

Filters = list[tuple[int, float, float]]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Kind:
    """An implementation. `draw` takes what `reference.sample_filtered` takes, and `room`, the
    number of candidates that a kernel holds at once.
    """

    name: str
    draw: Callable[..., torch.Tensor]
    device: str = "cpu"
    examples: int = 60
    vocabs: tuple[int, ...] = (1, 7, 64, 65, 197, 5000)
    real_vocabs: tuple[int, ...] = (49_152, 151_936)


def native(variant: build.Variant) -> Kind:
    def draw(*columns: torch.Tensor, room: int) -> torch.Tensor:
        return sampling.draw(built(variant), *columns)

    return Kind(variant.name, draw)


def triton(*columns: torch.Tensor, room: int) -> torch.Tensor:
    pytest.importorskip("triton_interpreter")
    from piecework.kernels.triton.sampling import sample_filtered

    if columns[0].shape[1] < 10_000:
        return sample_filtered(*columns, room=room, block=64)
    # Where nothing is a processor's own memory, large tiles are quicker.
    return sample_filtered(*columns, block=4096 if DEVICE == "cuda" else 1 << 17)


KINDS = [
    *map(native, native_variants()),
    Kind(
        "triton",
        triton,
        device=DEVICE,
        examples=examples(3, exploring=10),
        vocabs=(1, 7, 64, 197),
        real_vocabs=(151_936 // 2 - 1,),
    ),
]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name, scope="module")
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


def random_probs(rows: int, vocab: int, scale: float, seed: int) -> torch.Tensor:
    """With equals among them, as logits that were bfloat16 have."""
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale
    return logits.bfloat16().float().softmax(-1)


def columns(filters: Filters, vocab: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """`filters`: (top_k, top_p, min_p) of each row, top_k 0 for off."""
    top_k, top_p, min_p = zip(*filters, strict=True)
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.tensor([min(k or vocab, vocab) for k in top_k]),
        torch.tensor(top_p),
        torch.tensor(min_p),
        torch.rand(len(filters), generator=generator, dtype=torch.float64),
    )


def drawn(kind: Kind, *given_by: torch.Tensor, room: int = 16) -> list[int]:
    return kind.draw(*(each.to(kind.device) for each in given_by), room=room).tolist()


FILTERS = st.tuples(
    st.sampled_from([0, 1, 2, 7, 60, 100_000]),
    st.sampled_from([1.0, 0.95, 0.5, 1e-9, 1e-50]),
    st.sampled_from([0.0, 0.1, 1e-4, 1.0]),
)


def test_tokens_are_those_of_plain_torch(kind: Kind) -> None:
    """Peaked rows and flat ones, which fit the room for candidates or do not, with every filter
    and none; equals stand at every border.
    """

    @settings(max_examples=kind.examples)
    @given(
        filters=st.lists(FILTERS, min_size=1, max_size=4),
        vocab=st.sampled_from(kind.vocabs),
        scale=st.sampled_from([0.0, 0.1, 2.0, 30.0]),
        room=st.sampled_from([16, 128]),
        seed=st.integers(0, 1000),
    )
    def check(filters: Filters, vocab: int, scale: float, room: int, seed: int) -> None:
        probs = random_probs(len(filters), vocab, scale, seed)
        given_by = probs, *columns(filters, vocab, seed)
        assert drawn(kind, *given_by, room=room) == reference.sample_filtered(*given_by).tolist()

    check()


def test_vocabularies_of_real_models(kind: Kind) -> None:
    """Rows that keep few tokens, and one so flat that it is searched whole."""
    filters = [(50, 0.9, 0.0), (0, 0.95, 0.0), (0, 1.0, 0.05), (2000, 1.0, 0.0), (0, 0.5, 0.0)]
    for vocab in kind.real_vocabs:
        probs = torch.cat([random_probs(4, vocab, 4.0, 1), random_probs(1, vocab, 0.0, 1)])
        given_by = probs, *columns(filters, vocab)
        assert drawn(kind, *given_by) == reference.sample_filtered(*given_by).tolist()


def test_top_p_is_a_share_of_all_that_top_k_keeps(kind: Kind) -> None:
    """A first search leaves out unlikely tokens. Without their mass, half would be the first token
    alone.
    """
    probs = torch.tensor([[0.2, 0.2, *[0.003] * 200]])
    uniform = torch.tensor([0.9], dtype=torch.float64)
    filters = torch.tensor([50]), torch.tensor([0.5]), torch.tensor([0.0])
    assert drawn(kind, probs, *filters, uniform) == [1]


def test_rows_may_lie_apart(kind: Kind) -> None:
    probs, given_by = random_probs(2, 50, 2.0, 3), columns([(3, 1.0, 0.0), (0, 0.8, 0.0)], 50)
    wide = torch.full((2, 64), float("nan"), device=kind.device)
    wide[:, :50] = probs
    assert drawn(kind, wide[:, :50], *given_by) == drawn(kind, probs, *given_by)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0.0])
def test_a_row_without_probabilities_gives_a_token_of_the_vocabulary(
    kind: Kind, value: float
) -> None:
    """A broken model must not make the kernel read or write where it should not."""
    filters = [(0, 0.9, 0.0), (5, 1.0, 0.0), (0, 1.0, 0.5), (0, 1.0, float("nan"))]
    found = drawn(kind, torch.full((len(filters), 40), value), *columns(filters, 40))
    assert all(0 <= token < 40 for token in found)


def test_every_uniform_number_of_a_grid_draws_its_share(kind: Kind) -> None:
    """Equals share too: with eight alike and top-k 5, each of the five lowest ids is drawn a fifth
    of the time.
    """
    grid = torch.arange(10, dtype=torch.float64) / 10
    filters = torch.full((10,), 5), torch.full((10,), 1.0), torch.zeros(10)
    found = drawn(kind, torch.full((10, 8), 0.125), *filters, grid)
    assert found == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
