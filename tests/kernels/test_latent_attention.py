"""Latent attention says the same in both its forms."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from paged_steps import Step, latent

from piecework.kernels import latent_attention
from piecework.kernels.cpu.native.attention import native_or_torch
from piecework.kernels.latent_attention import LatentLayer, expands, plan_latent, run_latent
from piecework.kernels.paged_attention import TorchAttention

HEADS, LATENT, TURNED, UNTURNED, VALUE, PAGE = 3, 16, 8, 8, 12, 4
LENS = [(9, 0), (1, 12), (6, 7), (2, 30)]


def said(
    is_long: list[bool],
    backend: TorchAttention,
    dtype: torch.dtype | None = None,
    value: int = VALUE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What attention gives, and the pages behind it."""
    step = Step(LENS, page_size=PAGE, heads=HEADS, seed=1, kv_heads=1, head_size=LATENT + TURNED)
    step = latent(step, LATENT)
    cache = step.k_cache.nan_to_num(nan=5.0)
    layout = replace(step.heads, scale=0.3)
    if dtype is not None:
        cache, layout = cache.to(dtype), replace(layout, cache_dtype=dtype)
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(HEADS * (UNTURNED + value), LATENT, generator=generator)
    q = step.q[..., : UNTURNED + TURNED]
    out = torch.full((len(q), HEADS, value), float("nan"))
    layer = LatentLayer(q, step.new(step.keys), weight, out, cache, layout)
    planned = plan_latent(backend, step.metadata, PAGE, is_long)
    run_latent(backend, layer, backend.plan(step.metadata, PAGE), planned)
    return out, cache.float()


@pytest.mark.parametrize("value", [VALUE, 24])
@pytest.mark.parametrize("is_long", [[True, False, True, False], [True] * 4])
def test_expanded_requests_say_what_absorbed_ones_say(is_long: list[bool], value: int) -> None:
    """Values may be shorter than keys, and longer."""
    for backend in (TorchAttention(), native_or_torch()):
        assert isinstance(backend, TorchAttention)
        for one, other in zip(
            said(is_long, backend, value=value), said([], backend, value=value), strict=True
        ):
            assert torch.allclose(one, other, atol=1e-3)


def test_heads_may_be_expanded_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    together, _ = said([True] * 4, TorchAttention())
    monkeypatch.setattr(latent_attention, "_EXPANDED_NUMBERS", 1)
    assert torch.allclose(said([True] * 4, TorchAttention())[0], together, atol=1e-4)


def test_expanded_requests_read_what_a_cache_of_8_bits_holds() -> None:
    dtype = torch.float8_e4m3fn
    (one, kept), (other, wanted) = (
        said(is_long, TorchAttention(), dtype) for is_long in ([True] * 4, [])
    )
    assert torch.allclose(one, other, atol=1e-3) and torch.equal(kept, wanted)


@pytest.mark.parametrize(
    ("new", "length", "is_long"),
    [(1, 1000, False), (1, 2, False), (2048, 2048, True), (64, 8192, False), (512, 8192, True)],
)
def test_what_costs_less_is_taken(new: int, length: int, is_long: bool) -> None:
    """DeepSeek's sizes."""
    step = Step([(1, 1)], page_size=PAGE, heads=HEADS, seed=1, kv_heads=1)
    layout = replace(step.heads, key_size=576, value_size=512, latent=True)
    assert expands(new, length, 256, layout) == is_long
