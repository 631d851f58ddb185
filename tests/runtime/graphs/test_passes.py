"""Quantised models in recorded pieces say the same whichever passes their forwards went through,
and what lies in padded rows changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_here import CompiledHere
from quantized_checkpoints import make_fp8
from recording_platform import RecordingPlatform
from sparse import sparse
from tiny_models import make_tiny_model

from piecework import PassConfig
from piecework.kernels import reference
from piecework.kernels.cpu.native.linear import native_linear
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.engine import graph_startup
from piecework.runtime.executor import model_runner
from piecework.runtime.llm import LLM

LAYERS = 2
# Every step is padded: to 8, 32 and 64 tokens.
PROMPTS = [[(17 * i + 3 * j) % 400 for j in range(length)] for i, length in enumerate((5, 19, 40))]
PARAMS = SamplingParams(temperature=0.0, max_new_tokens=4, prompt_logprobs=0, logprobs=0)
FUSIONS: dict[str, bool | None] = {"norm_quant": True, "silu_quant": True, "attention_quant": True}


def run(
    path: Path, passes: PassConfig, *, dtype: str = "float32", **settings: Any
) -> tuple[list[float], dict[str, int]]:
    """Log-probabilities of prompts and answers, and how often passes matched."""
    llm = LLM(
        str(path),
        dtype=dtype,
        max_total_tokens=512,
        context_length=128,
        num_threads=1,
        piecewise_cuda_graph=True,
        piecewise_cuda_graph_compiler="eager",
        piecewise_cuda_graph_tokens="8,32,64",
        cuda_graph_bs="1,4",
        passes=passes,
        **settings,
    )
    said = []
    for prompt in PROMPTS:
        (answer,) = llm.generate([prompt], PARAMS)
        entries = [*(answer.prompt_logprobs or []), *answer.logprobs]
        said += [entry.logprob for entry in entries if entry is not None]
    assert (llm.info.graphs.failed_sizes, llm.info.graphs.distinct_pieces) == ({}, 3)
    assert llm.core.stats().padded_tokens_total >= 3 + 13 + 24
    prefill = llm.core._runner.graphs.base.prefill  # type: ignore[attr-defined]
    return said, prefill._forward.plan.passes


# Of numbers that are scaled by token, tests/compilation/passes has each fusion.
@pytest.mark.parametrize(
    ("kind", "lowered"),
    sparse(product(("static fp8", "int8 by token"), (True, False)), kept=[("static fp8", True)]),
)
def test_fusions_change_no_answer(
    tmp_path: Path, kind: str, lowered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(graph_startup, "start", CompiledHere)
    platform = RecordingPlatform()
    monkeypatch.setattr(model_runner, "detect", lambda name: platform)
    settings: dict[str, Any] = {}
    if kind == "static fp8":
        path = make_fp8(tmp_path, block=False, static=True)
    else:
        path = make_tiny_model(tmp_path / "model", num_hidden_layers=LAYERS)
        settings["quantization"] = "int8"
    plain, matches = run(path, PassConfig(**dict.fromkeys(FUSIONS, False)), **settings)
    assert not set(matches) & set(FUSIONS)
    passes = PassConfig(**FUSIONS, lower=lowered, in_place=lowered)
    fused, matches = run(path, passes, **settings)
    assert matches["norm_quant"] == 2 * LAYERS and matches["silu_quant"] == LAYERS
    assert matches["attention_quant"] == (LAYERS if kind == "static fp8" else 0)
    assert (matches.get("in_place", 0) > 0) == lowered
    assert fused == plain


@pytest.mark.skipif(native_linear() is None, reason="no CPU kernels")
def test_a_cpu_s_attention_writes_fp8_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(graph_startup, "start", CompiledHere)
    monkeypatch.setattr(model_runner, "detect", lambda name: RecordingPlatform())
    path = make_fp8(tmp_path, block=False, static=True)
    settings = {"dtype": "bfloat16", "cuda_graph_backend_decode": "disabled"}
    fused, matches = run(path, PassConfig(), **settings)
    assert matches["attention_quant"] == LAYERS
    plain, matches = run(path, PassConfig(attention_quant=False), **settings)
    assert "attention_quant" not in matches and fused == plain


X = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
WEIGHT, SCALE = torch.rand(64), torch.tensor([0.1])
OPS: dict[str, Callable[[torch.Tensor], Any]] = {
    "quantize_static": lambda x: (x, SCALE, torch.int8),
    "quantize_dynamic": lambda x: (x, 64, torch.int8),
    "rms_norm_quantize_static": lambda x: (x, WEIGHT, 1e-5, SCALE, torch.int8),
    "rms_norm_quantize_dynamic": lambda x: (x, WEIGHT, 1e-5, 32, torch.int8),
    "add_rms_norm_quantize_static": lambda x: (x, x, WEIGHT, 1e-5, SCALE, torch.int8),
    "add_rms_norm_quantize_dynamic": lambda x: (x, x, WEIGHT, 1e-5, 64, torch.int8),
    "silu_and_mul_quantize_static": lambda x: (x, SCALE, torch.int8),
    "silu_and_mul_quantize_dynamic": lambda x: (x, 32, torch.int8),
}


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -3e38])
@pytest.mark.parametrize("op", OPS)
def test_no_scale_reads_padded_rows(op: str, poison: float) -> None:
    padded = torch.cat((X, torch.full((5, 64), poison)))
    for dtype in (torch.float32, torch.bfloat16):
        for compute in (getattr(reference, op), getattr(torch.ops.piecework, op)):
            wanted = compute(*OPS[op](X.to(dtype)))
            results = compute(*OPS[op](padded.to(dtype)))
            for one, other in zip(_listed(results), _listed(wanted), strict=True):
                assert torch.equal(one[: len(X)], other)


def _listed(results: Any) -> list[torch.Tensor]:
    return list(results) if isinstance(results, tuple) else [results]
