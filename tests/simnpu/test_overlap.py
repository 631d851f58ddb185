"""Overlapped steps on a device that tells nothing before it is asked: a launch never waits, and the
CPU's tokens come out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_here import CompiledHere
from tiny_models import make_tiny_model

from piecework.kernels.npu.attention import AscendAttention
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.engine import graph_startup
from piecework.runtime.engine.core import EngineCore
from piecework.runtime.executor.step import PendingStep
from piecework.runtime.llm import LLM
from tests.runtime.models.variants import VARIANTS

PROMPTS = [
    [(17 * i + 3 * j) % 400 for j in range(length)]
    for i, length in enumerate([3, 120, 9, 150, 14, 127, 5, 33])
]
PARAMS = [
    SamplingParams(temperature=0.0, max_new_tokens=5, ignore_eos=True),
    SamplingParams(
        temperature=0.0, max_new_tokens=9, ignore_eos=True, logprobs=3, prompt_logprobs=2
    ),
    SamplingParams(temperature=1.0, seed=1, max_new_tokens=12, ignore_eos=True, logprobs=0),
    SamplingParams(temperature=0.8, seed=2, top_k=20, top_p=0.9, max_new_tokens=6),
    SamplingParams(
        temperature=0.0,
        max_new_tokens=11,
        repetition_penalty=1.3,
        frequency_penalty=0.4,
        presence_penalty=0.2,
    ),
    SamplingParams(
        temperature=0.0,
        max_new_tokens=10,
        min_new_tokens=4,
        stop_token_ids=list(range(0, 400, 3)),
        logit_bias={5: 3.0, 7: -9.0},
    ),
    SamplingParams(temperature=0.0, max_new_tokens=0, prompt_logprobs=1),
    SamplingParams(temperature=1.0, seed=3, min_p=0.05, top_k=50, max_new_tokens=8),
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(graph_startup, "start", CompiledHere)
    # Hardware's kernel takes 16 bits alone; the simulated one takes 32, in which answers are
    # compared tightly.
    monkeypatch.setattr(AscendAttention, "dtypes", (torch.float32,))
    monkeypatch.setattr(AscendAttention, "head_sizes", (16, 32))


def engine(path: Path, device: str, **settings: Any) -> LLM:
    fixed: dict[str, Any] = {
        "dtype": "float32",
        "max_total_tokens": 4096,
        "num_threads": 1,
        "chunked_prefill_size": 100,
    }
    return LLM(str(path), device=device, **fixed, **settings)


def launch_without_waiting(simnpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = EngineCore._launch

    def checked(*arguments: Any) -> PendingStep:
        try:
            with simnpu.no_waiting():
                return launch(*arguments)
        except RuntimeError as error:
            # The scheduler would take it for the fault of a request, and try again.
            pytest.fail(str(error))

    monkeypatch.setattr(EngineCore, "_launch", checked)


def assert_same(llm: LLM, path: Path) -> None:
    for ours, expected in zip(
        llm.generate(PROMPTS, PARAMS), engine(path, "cpu").generate(PROMPTS, PARAMS), strict=True
    ):
        assert ours.token_ids == expected.token_ids and ours.finish_reason == expected.finish_reason
        said, wanted = (
            [e.logprob for e in [*(c.prompt_logprobs or []), *c.logprobs] if e is not None]
            for c in (ours, expected)
        )
        assert said == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize(
    "prefill", ["disabled", "piecewise", pytest.param("breakable", marks=pytest.mark.slow)]
)
def test_a_launch_never_waits(
    tmp_path: Path, simnpu: Any, monkeypatch: pytest.MonkeyPatch, prefill: str
) -> None:
    path = make_tiny_model(tmp_path / "model", num_hidden_layers=2)
    graphs = (
        {}
        if prefill == "disabled"
        else {"cuda_graph_backend_prefill": prefill, "piecewise_cuda_graph_tokens": "16,100"}
    )
    llm = engine(path, "npu", cuda_graph_backend_decode="disabled", **graphs)
    assert llm.info.overlap_schedule
    # The first step brings masks to the device that stay there.
    llm.generate([[1]], SamplingParams(max_new_tokens=1))
    launch_without_waiting(simnpu, monkeypatch)
    assert_same(llm, path)
    stats = llm.core.stats()
    assert stats.steps_total - stats.overlapped_steps_total == 2, (
        "a step after the first was launched with nothing in flight"
    )
    assert stats.discarded_tokens_total > 0


@pytest.mark.parametrize("name", ["deepseek-v3", "llama4", "mistral-window"])
def test_other_kinds_of_attention_never_wait(
    tmp_path: Path, simnpu: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Latent vectors (of which long prompts are expanded), chunks, and windows. Three requests of
    several chunks and windows are planned beside short ones.
    """
    # The heads of expanded latent vectors are longer.
    monkeypatch.setattr(AscendAttention, "head_sizes", (16, 32, 64))
    architecture, sizes = VARIANTS[name]
    path = make_tiny_model(tmp_path / "model", architecture, **sizes)
    llm = engine(path, "npu", cuda_graph_backend_decode="disabled", page_size=16)
    llm.generate([[1]], SamplingParams(max_new_tokens=1))
    launch_without_waiting(simnpu, monkeypatch)
    params = [SamplingParams(temperature=0.0, max_new_tokens=6, ignore_eos=True)] * len(PROMPTS)
    llm.generate(PROMPTS, params)
    assert llm.core.stats().overlapped_steps_total > 0


def test_recorded_decodes_never_wait(
    tmp_path: Path, simnpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_tiny_model(tmp_path / "model", num_hidden_layers=2)
    llm = engine(path, "npu", cuda_graph_backend_decode="full", cuda_graph_bs="1,2,4,8")
    launch_without_waiting(simnpu, monkeypatch)
    assert_same(llm, path)
    stats = llm.core.stats()
    assert (
        stats.graph_replays_total > 0
        and not llm.core._runner.graph_counts().fallbacks.keys() & {"replay_failed"}
    )
    assert stats.steps_total - stats.overlapped_steps_total == 1


def test_without_overlap_every_step_is_read_before_the_next(tmp_path: Path, simnpu: Any) -> None:
    path = make_tiny_model(tmp_path / "model", num_hidden_layers=2)
    llm = engine(path, "npu", disable_overlap_schedule=True, cuda_graph_backend_decode="disabled")
    assert_same(llm, path)
    stats = llm.core.stats()
    assert (stats.overlapped_steps_total, stats.discarded_tokens_total) == (0, 0)


@pytest.mark.parametrize("read", ["samples", "prompt"])
def test_numbers_that_are_read_too_early_are_found_out(
    tmp_path: Path, simnpu: Any, monkeypatch: pytest.MonkeyPatch, read: str
) -> None:
    """What proves that the tests above can fail: a step that looks at its results while it is
    launched.
    """
    path = make_tiny_model(tmp_path / "model", num_hidden_layers=2)
    llm = engine(path, "npu", cuda_graph_backend_decode="disabled")
    llm.generate([[1]], SamplingParams(max_new_tokens=1))
    build = PendingStep.__init__

    def hasty(step: PendingStep, *arguments: Any) -> None:
        build(step, *arguments)
        if read == "samples" and step.samples is not None:
            step.samples.tokens.tolist()
        elif step._prompt_rows:
            step.read()

    monkeypatch.setattr(PendingStep, "__init__", hasty)
    launch_without_waiting(simnpu, monkeypatch)
    with pytest.raises(pytest.fail.Exception, match="waits for the device"):
        llm.generate(PROMPTS, PARAMS)
