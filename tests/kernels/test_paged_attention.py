"""Plain torch's attention in memory for fewer scores than a prompt has."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from paged_steps import Step, latent

from piecework.kernels import paged_attention
from piecework.kernels.paged_attention import TorchAttention


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("is_latent", [True, False])
def test_prompts_whose_scores_are_many_are_computed_in_parts(
    window: int | None, is_latent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said() -> torch.Tensor:
        lens = [(40, 0), (1, 9), (17, 21)]
        step = Step(lens, page_size=4, heads=4, seed=3, kv_heads=1 if is_latent else 2)
        if is_latent:
            step = latent(step, 6)
        else:
            step.heads = replace(step.heads, softcap=2.0)
        return step.run(TorchAttention(), window=window)

    whole = said()
    monkeypatch.setattr(paged_attention, "_SCORES", 4 * 40 * 7)
    assert torch.allclose(said(), whole, atol=1e-5)
