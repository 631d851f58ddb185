"""Adapters of every shape of checkpoint: fused and interleaved projections, experts that stay as
they are, and layers with a recurrent state.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_adapters import logprobs_after, make_adapter, merged_model, peft_model
from tiny_models import make_tiny_model

from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.llm import LLM

PARAMS = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True, logprobs=0)
PROMPT = [5, 6, 7, 8, 9, 10, 300, 44]
NONE: dict[str, Any] = {}
MODELS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 6},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": NONE,
    "gemma2": {"head_dim": 16, "sliding_window": 6},
    "gemma3_text": {"head_dim": 16, "sliding_window": 6},
    "phi3": {"pad_token_id": 0},
    "gpt_neox": {},  # By transformers' own code.
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "olmo2": NONE,
    "bloom": {"n_layer": 2, "n_head": 4},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "head_dim": 16,
    },
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 8},
}
REFUSED_BY_PEFT = ("mamba2",)  # They are compared with merged weights.


@pytest.mark.parametrize("architecture", MODELS)
def test_its_adapters_give_what_peft_gives(architecture: str, tmp_path: Path) -> None:
    base = make_tiny_model(tmp_path / "base", architecture, **MODELS[architecture])
    adapter = make_adapter(tmp_path / "adapter", base, rank=3)
    llm = LLM(
        str(base),
        dtype="float32",
        lora_modules=f"own={adapter}",
        max_total_tokens=512,
        num_threads=1,
    )
    given = llm.generate([PROMPT, PROMPT], PARAMS, adapters=["own", ""])
    for result, adapted in zip(given, (adapter, None), strict=True):
        assert result.error is None
        by_peft = adapted is not None and architecture not in REFUSED_BY_PEFT
        model = peft_model(base, adapted) if by_peft else merged_model(base, adapted)
        wanted = logprobs_after(model, PROMPT, result.token_ids)
        assert result.token_ids == wanted.argmax(-1).tolist()
        found = torch.tensor([each.logprob for each in result.logprobs])
        assert torch.allclose(found, wanted.amax(-1), atol=2e-3)
    assert given[0].token_ids != given[1].token_ids


def test_a_model_without_linear_layers_is_refused(tmp_path: Path) -> None:
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
    base = make_tiny_model(tmp_path, "gpt2", **sizes)
    with pytest.raises(ValueError, match="this model has no linear layers that adapters"):
        LLM(str(base), enable_lora=True)
