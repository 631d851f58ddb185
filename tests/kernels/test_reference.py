"""The reference ops: the same bits as transformers' in every dtype, for any shape, with their
inputs left alone.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from piecework.kernels import reference
from piecework.kernels.reference import (
    add_rms_norm,
    rms_norm,
    rotary_embedding,
    sample_filtered,
    silu_and_mul,
)

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
SEEDS = st.integers(0, 2**32 - 1)


def random(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def turning(
    tokens: int, head_size: int, dtype: torch.dtype, first: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Angles [tokens, head_size] of the positions from `first` on: (cos, sin), both halves
    alike.
    """
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, head_size, 2) / head_size)
    angles = torch.outer(torch.arange(first, first + tokens), frequencies).repeat(1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def signed(sin: torch.Tensor) -> torch.Tensor:
    """As `rotary_embedding` takes it."""
    half = sin.shape[-1] // 2
    return torch.cat((-sin[..., :half], sin[..., half:]), -1)


@given(
    seed=SEEDS,
    tokens=st.integers(0, 9),
    size=st.integers(1, 70),
    dtype=DTYPES,
    eps=st.sampled_from([1e-6, 1e-5, 1e-2]),
)
@settings(deadline=None)
def test_rms_norm_is_transformers_to_the_bit(
    seed: int, tokens: int, size: int, dtype: torch.dtype, eps: float
) -> None:
    x, weight = random(seed, tokens, size, dtype=dtype), random(seed + 1, size, dtype=dtype)
    reference = LlamaRMSNorm(size, eps=eps).to(dtype)
    reference.weight.data.copy_(weight)
    before = x.clone()
    with torch.no_grad():
        assert torch.equal(rms_norm(x, weight, eps), reference(x))
    assert torch.equal(x, before)


@given(seed=SEEDS, tokens=st.integers(1, 9), size=st.integers(1, 70), dtype=DTYPES)
@settings(deadline=None)
def test_add_rms_norm_carries_the_sum_on(
    seed: int, tokens: int, size: int, dtype: torch.dtype
) -> None:
    x, residual = (
        random(seed, tokens, size, dtype=dtype),
        random(seed + 1, tokens, size, dtype=dtype),
    )
    weight, before = random(seed + 2, size, dtype=dtype), (x.clone(), residual.clone())
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(x + residual, weight, 1e-5))
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


@given(seed=SEEDS, tokens=st.integers(0, 9), size=st.integers(1, 70), dtype=DTYPES)
@settings(deadline=None)
def test_silu_and_mul_gates_with_the_first_half(
    seed: int, tokens: int, size: int, dtype: torch.dtype
) -> None:
    x = random(seed, tokens, 2 * size, dtype=dtype)
    before = x.clone()
    assert torch.equal(silu_and_mul(x), ACT2FN["silu"](x[:, :size]) * x[:, size:])
    assert torch.equal(x, before)


@given(
    seed=SEEDS,
    tokens=st.integers(1, 9),
    heads=st.integers(1, 5),
    half=st.integers(1, 40),
    dtype=DTYPES,
    first=st.integers(0, 9000),
)
@settings(deadline=None)
def test_rotary_embedding_is_transformers_to_the_bit(
    seed: int, tokens: int, heads: int, half: int, dtype: torch.dtype, first: int
) -> None:
    cos, sin = turning(tokens, 2 * half, dtype, first)
    # q and k are a part of what the projection gives, so their rows do not lie one behind the
    # other.
    x = random(seed, tokens, heads + 2, 2 * half, dtype=dtype)[:, :heads]
    before = x.clone()
    turned = rotary_embedding(x, cos[:, None], signed(sin)[:, None])
    expected, _ = apply_rotary_pos_emb(
        x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos[None], sin[None]
    )
    assert torch.equal(turned, expected[0].transpose(0, 1))
    assert torch.equal(x, before)


@given(seed=SEEDS, shift=st.integers(0, 500))
@settings(deadline=None)
def test_a_score_depends_on_the_distance_alone(seed: int, shift: int) -> None:
    """What rotary embedding is for: query and key moved together score the same."""
    q, k = (random(seed + i, 1, 1, 16, dtype=torch.float32).expand(20, 1, 16) for i in (0, 1))
    scores = []
    for first in (0, shift):
        cos, sin = turning(20, 16, torch.float32, first)
        turned = [rotary_embedding(x, cos[:, None], signed(sin)[:, None])[:, 0] for x in (q, k)]
        scores.append(turned[0] @ turned[1].T)
    torch.testing.assert_close(scores[0], scores[1], atol=1e-2, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_position_0_is_not_turned(dtype: torch.dtype) -> None:
    x = random(0, 1, 3, 8, dtype=dtype)
    cos, sin = turning(1, 8, dtype)
    assert torch.equal(rotary_embedding(x, cos[:, None], signed(sin)[:, None]), x)


def drawn_by_definition(
    probs: list[float], top_k: int, top_p: float, min_p: float, uniform: float
) -> int:
    """One row, in whole numbers throughout."""
    order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    weights = [int(probs[token] * 2.0**52) for token in order]
    mass = sum(weights[:top_k]) if top_k < len(probs) else 2**52
    kept = 0
    for place, token in enumerate(order[:top_k]):
        far = top_p < 1.0 and place > 0 and sum(weights[:place]) >= top_p * mass
        if far or torch.tensor(probs[token]) < torch.tensor(min_p) * probs[order[0]]:
            break
        kept += 1
    goal = min(int(uniform * sum(weights[:kept])), sum(weights[:kept]) - 1)
    return next(token for place, token in enumerate(order) if sum(weights[: place + 1]) > goal)


@given(
    seed=SEEDS,
    vocab=st.sampled_from([1, 5, 300]),
    scale=st.sampled_from([0.0, 0.1, 3.0]),
    top_k=st.sampled_from([1, 2, 40, 290, 300]),
    top_p=st.sampled_from([1.0, 0.9, 0.3, 1e-9]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    candidates=st.sampled_from([16, 1024]),
)
@settings(deadline=None)
def test_filtered_sampling_is_its_definition(
    seed: int, vocab: int, scale: float, top_k: int, top_p: float, min_p: float, candidates: int
) -> None:
    """However many candidates are looked at first; equals stand at every border."""
    generator = torch.Generator().manual_seed(seed)
    probs = (torch.randn(1, vocab, generator=generator) * scale).bfloat16().float().softmax(-1)
    uniform = torch.rand(1, generator=generator, dtype=torch.float64)
    filters = (torch.tensor([min(top_k, vocab)]), torch.tensor([top_p]), torch.tensor([min_p]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "_CANDIDATES", candidates)
        drawn = int(sample_filtered(probs, *filters, uniform))
    assert drawn == drawn_by_definition(
        probs[0].tolist(), min(top_k, vocab), float(filters[1]), min_p, float(uniform)
    )
