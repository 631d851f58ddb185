"""Greedy and plain draws, softmax and masks in C++ give what plain torch gives, in every variant of
the kernels.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_variants import built, native_variants, needs_kernels

from piecework.kernels import ops, plain_sampling, reference
from piecework.kernels.cpu.native import ops as native_ops
from piecework.kernels.cpu.native import sampling
from piecework.kernels.cpu.platform import CpuPlatform


@pytest.fixture(params=native_variants(), ids=lambda variant: variant.name, scope="module")
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    return built(request.param)


@settings(max_examples=60)
@given(
    rows=st.integers(0, 5),
    vocab=st.sampled_from([1, 63, 64, 65, 1000]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    seed=st.integers(0, 1000),
)
def test_the_likeliest_is_plain_torchs(
    library: ctypes.CDLL, rows: int, vocab: int, dtype: torch.dtype, seed: int
) -> None:
    """Equals among them, and rows that lie apart."""
    logits = (
        torch.randn(rows, vocab + 3, generator=torch.Generator().manual_seed(seed))
        .to(dtype)
        .float()[:, :vocab]
    )
    assert torch.equal(sampling.likeliest(library, logits), logits.argmax(-1))


def test_zeros_infinities_and_nan_stand_where_torch_has_them(library: ctypes.CDLL) -> None:
    nan, inf = float("nan"), float("inf")
    rows = [
        [5.0, 1.0, -nan, 2.0],
        [-inf] * 4,
        [-3.0, -1.0, -2.0, -1.0],
        [1.0, inf, nan, nan],
        [-inf, -5.0, -inf, -7.0],
        [-0.0, 0.0, -2.0, -3.0],
    ]
    logits = torch.tensor(rows)
    assert torch.equal(sampling.likeliest(library, logits), logits.argmax(-1))


@settings(max_examples=40)
@given(
    vocab=st.sampled_from([1, 7, 256, 257, 1000, 49_152]),
    scale=st.sampled_from([0.0, 1.0, 30.0]),
    temperature=st.sampled_from([1e-30, 0.3, 1.0, 100.0]),
    banned=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
def test_plain_draws_and_the_softmax_are_plain_torchs_but_for_rounding(
    library: ctypes.CDLL, vocab: int, scale: float, temperature: float, banned: int, seed: int
) -> None:
    """The token drawn is torch's for a number that is next to the one that was given."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, vocab + 5, generator=generator)[:, :vocab] * scale
    logits[1:, : vocab // 2 * (banned > 0)] = -torch.inf
    temperatures = torch.full((4,), temperature)
    uniform = torch.rand(4, 2, generator=generator)
    drawn = sampling.draw_plain(library, logits, temperatures, uniform)
    probs = plain_sampling.softmax(logits.clone(), temperatures)
    near = []
    for first in (-1e-5, 0.0, 1e-5):
        for second in (-1e-5, 0.0, 1e-5):
            moved = (uniform + torch.tensor([first, second])).clamp(0.0, 1 - 2.0**-24)
            near.append(plain_sampling.sample_plain(logits.clone(), temperatures, moved))
    assert (torch.stack(near) == drawn).any(0).all()
    assert (probs.gather(1, drawn[:, None]) > 0).all()
    softened = sampling.soften(library, logits, temperatures)
    assert softened.allclose(probs, rtol=3e-5, atol=1e-37)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("nan"), None])
def test_logits_that_are_not_finite_give_no_token(
    library: ctypes.CDLL, value: float | None
) -> None:
    """None: no token is allowed."""
    logits = torch.zeros(2, 70)
    logits[1, 66 if value is not None else slice(None)] = -torch.inf if value is None else value
    given = torch.ones(2), torch.full((2, 2), 0.5)
    assert sampling.draw_plain(library, logits, *given).sign().tolist() == [1, -1]
    assert plain_sampling.sample_plain(logits, *given).sign().tolist() == [1, -1]
    softened = sampling.soften(library, logits, given[0])
    assert softened[0].isfinite().all() and softened[1].isnan().all()


@needs_kernels
def test_who_computes_attention_natively_samples_natively(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_versions", {})
    CpuPlatform().make_attention_backend("torch")
    assert ops._versions == {}
    CpuPlatform().make_attention_backend("native")
    assert ops._versions == {"cpu": native_ops}


@settings(max_examples=30)
@given(
    rows=st.lists(st.integers(0, 4), min_size=1, max_size=5, unique=True),
    vocab=st.sampled_from([1, 31, 32, 33, 64, 1000]),
    words=st.lists(st.sampled_from([0, -1, 1, 2**31 - 1, -(2**31), 0x0F0F]), min_size=1),
)
def test_a_mask_bans_what_it_has_no_bit_for(
    library: ctypes.CDLL, rows: list[int], vocab: int, words: list[int]
) -> None:
    width = -(-vocab // 32)
    bits = torch.tensor([words[i % len(words)] for i in range(len(rows) * width)])
    bits = bits.view(len(rows), width).to(torch.int32)
    logits = torch.randn(5, vocab)
    expected = logits.clone()
    reference.mask_logits(expected, torch.tensor(rows), bits)
    sampling.mask(library, logits, torch.tensor(rows), bits)
    assert torch.equal(logits, expected)
    allowed = [(int(bits[0, token // 32]) >> (token % 32)) & 1 for token in range(vocab)]
    assert (logits[rows[0]] > -torch.inf).tolist() == [bool(bit) for bit in allowed]
