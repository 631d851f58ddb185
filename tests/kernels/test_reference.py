"""The reference ops: the same bits as transformers' in every dtype, for any shape, with their inputs left alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from piecework.kernels.reference import add_rms_norm, rms_norm, rotary_embedding, silu_and_mul

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
SEEDS = st.integers(0, 2**32 - 1)


def random(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def turning(tokens: int, head_size: int, dtype: torch.dtype, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Angles [tokens, head_size] of the positions from `first` on: (cos, sin), both halves alike."""
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, head_size, 2) / head_size)
    angles = torch.outer(torch.arange(first, first + tokens), frequencies).repeat(1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def signed(sin: torch.Tensor) -> torch.Tensor:
    """As `rotary_embedding` takes it."""
    half = sin.shape[-1] // 2
    return torch.cat((-sin[..., :half], sin[..., half:]), -1)


@given(seed=SEEDS, tokens=st.integers(0, 9), size=st.integers(1, 70), dtype=DTYPES, eps=st.sampled_from([1e-6, 1e-5, 1e-2]))
@settings(deadline=None)
def test_rms_norm_is_transformers_to_the_bit(seed: int, tokens: int, size: int, dtype: torch.dtype, eps: float) -> None:
    x, weight = random(seed, tokens, size, dtype=dtype), random(seed + 1, size, dtype=dtype)
    reference = LlamaRMSNorm(size, eps=eps).to(dtype)
    reference.weight.data.copy_(weight)
    before = x.clone()
    with torch.no_grad():
        assert torch.equal(rms_norm(x, weight, eps), reference(x))
    assert torch.equal(x, before)


@given(seed=SEEDS, tokens=st.integers(1, 9), size=st.integers(1, 70), dtype=DTYPES)
@settings(deadline=None)
def test_add_rms_norm_carries_the_sum_on(seed: int, tokens: int, size: int, dtype: torch.dtype) -> None:
    x, residual = random(seed, tokens, size, dtype=dtype), random(seed + 1, tokens, size, dtype=dtype)
    weight, before = random(seed + 2, size, dtype=dtype), (x.clone(), residual.clone())
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(x + residual, weight, 1e-5))
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


@given(seed=SEEDS, tokens=st.integers(0, 9), size=st.integers(1, 70), dtype=DTYPES)
@settings(deadline=None)
def test_silu_and_mul_gates_with_the_first_half(seed: int, tokens: int, size: int, dtype: torch.dtype) -> None:
    x = random(seed, tokens, 2 * size, dtype=dtype)
    before = x.clone()
    assert torch.equal(silu_and_mul(x), ACT2FN["silu"](x[:, :size]) * x[:, size:])
    assert torch.equal(x, before)


@given(seed=SEEDS, tokens=st.integers(1, 9), heads=st.integers(1, 5), half=st.integers(1, 40), dtype=DTYPES, first=st.integers(0, 9000))
@settings(deadline=None)
def test_rotary_embedding_is_transformers_to_the_bit(seed: int, tokens: int, heads: int, half: int, dtype: torch.dtype, first: int) -> None:
    cos, sin = turning(tokens, 2 * half, dtype, first)
    # q and k are a part of what the projection gives, so their rows do not lie one behind the other.
    x = random(seed, tokens, heads + 2, 2 * half, dtype=dtype)[:, :heads]
    before = x.clone()
    turned = rotary_embedding(x, cos[:, None], signed(sin)[:, None])
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos[None], sin[None])
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
