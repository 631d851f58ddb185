"""Rotary frequencies and tables: transformers' for every type of scaling, by hand where there is a
formula to check.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from piecework.runtime.config.model import ModelConfig
from piecework.runtime.layers.rotary import Rotary, scaled_frequencies

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SCALINGS: dict[str, dict[str, Any]] = {"default": {}, "linear": {"factor": 4.0}, "llama3": LLAMA3}


def config(rope_type: str = "default", rope_scaling: dict[str, Any] | None = None) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=8, hidden_size=64, num_layers=1, num_heads=1,
        num_kv_heads=1, head_dim=64, intermediate_size=8, norm_eps=1e-5,
        max_position_embeddings=300, rope_theta=5e5, rope_type=rope_type,
        rope_scaling=rope_scaling or {},
    )  # fmt: skip


@pytest.mark.parametrize("rope_type", SCALINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tables_are_transformers_to_the_bit(rope_type: str, dtype: torch.dtype) -> None:
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=64,
            num_attention_heads=1,
            max_position_embeddings=300,
            rope_parameters={"rope_type": rope_type, "rope_theta": 5e5, **SCALINGS[rope_type]},
        )
    )
    positions = torch.tensor([0, 1, 299, 17, 17])
    cos, sin = theirs(torch.empty(0, dtype=dtype), positions[None])
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        rotary = Rotary(config(rope_type, SCALINGS[rope_type]))
        rotary.fill()
        ours = rotary(positions)
    finally:
        torch.set_default_dtype(before)
    assert ours.cos.dtype == dtype
    assert torch.equal(ours.cos[:, 0], cos[0])
    assert torch.equal(ours.signed_sin[:, 0], torch.cat((-sin[0, :, :32], sin[0, :, 32:]), -1))


def test_llama_3_keeps_short_waves_and_stretches_long_ones() -> None:
    plain, scaled = (scaled_frequencies(each)[0] for each in (config(), config("llama3", LLAMA3)))
    ratio = plain / scaled
    assert ratio[0] == 1.0 and ratio[-1] == 8.0
    assert torch.all(ratio.diff() >= 0)
    assert torch.any((ratio > 1.1) & (ratio < 7.9))


def test_stored_factors_turn_as_the_scaling_they_were_made_from() -> None:
    """GGUF's converter works Llama 3.1's scaling out into a factor a frequency."""
    plain, scaled = (scaled_frequencies(each)[0] for each in (config(), config("llama3", LLAMA3)))
    stored = config("divided", {"factors": (plain / scaled).tolist()})
    torch.testing.assert_close(scaled_frequencies(stored)[0], scaled)


def test_stored_factors_must_fit_the_head_size() -> None:
    with pytest.raises(ValueError, match="31 rope factors do not fit a head size of 64"):
        config("divided", {"factors": [1.0] * 31})
