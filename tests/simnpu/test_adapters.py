"""Adapters (LoRA) on the simulated NPU: recorded prefills and decodes of any mixture give the CPU's
answers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_here import CompiledHere
from tiny_adapters import make_adapter
from tiny_models import make_tiny_model

from piecework.kernels.npu.attention import AscendAttention
from piecework.kernels.npu.platform import NpuPlatform
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.engine import graph_startup
from piecework.runtime.llm import LLM

PROMPTS = [[(17 * i + 3 * j) % 400 for j in range(4 + 2 * i)] for i in range(4)]
MIXTURES = [["n0", "", "n1", "n0"], ["n1"] * 4, [""] * 4]
PARAMS = SamplingParams(temperature=0, max_new_tokens=4, ignore_eos=True, logprobs=1)


def test_recorded_steps_of_any_mixture(
    tmp_path: Path, simnpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(graph_startup, "start", CompiledHere)
    # The simulated kernel takes 32 bits, in which answers are compared tightly.
    monkeypatch.setattr(AscendAttention, "dtypes", (torch.float32,))
    monkeypatch.setattr(AscendAttention, "head_sizes", (16, 32))
    monkeypatch.setattr(NpuPlatform, "padding_limit", 8.0)
    path = make_tiny_model(tmp_path / "model", num_hidden_layers=2)
    adapters = [make_adapter(tmp_path / f"{n}", path, seed=n, rank=3 + 15 * n) for n in range(2)]
    settings: dict[str, Any] = {
        "lora_modules": ",".join(f"n{n}={each}" for n, each in enumerate(adapters)),
        "dtype": "float32",
        "max_total_tokens": 2048,
        "num_threads": 1,
        "disable_radix_cache": True,
    }
    cpu = LLM(str(path), device="cpu", disable_cuda_graph=True, **settings)
    npu = LLM(
        str(path),
        device="npu",
        cuda_graph_backend_prefill="piecewise",
        piecewise_cuda_graph_tokens="8,32",
        max_running_requests=4,
        **settings,
    )
    assert (npu.info.graphs.failed_sizes, npu.info.graphs.decode_sizes) == ({}, [1, 2, 4])
    with simnpu.strict_addresses():
        for names in MIXTURES:
            found = npu.generate(PROMPTS, PARAMS, adapters=names)
            wanted = cpu.generate(PROMPTS, PARAMS, adapters=names)
            for one, other in zip(found, wanted, strict=True):
                assert one.token_ids == other.token_ids
                assert [each.logprob for each in one.logprobs] == pytest.approx(
                    [each.logprob for each in other.logprobs], abs=1e-4
                )
    stats = npu.core.stats()
    assert stats.graph_replays_total == stats.steps_total
