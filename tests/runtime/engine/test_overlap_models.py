"""Overlapped steps of real models: the same text as without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_tiny_model

from piecework.kernels.cpu.platform import CpuPlatform
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.engine.core import EngineCore
from piecework.runtime.llm import LLM


def test_a_model_gives_the_same_text(tmp_path: Path) -> None:
    """Greedy, sampled, penalised and stopped sequences of a real engine."""
    path = make_tiny_model(tmp_path / "model")
    prompts = [
        [(17 * i + 3 * j) % 400 for j in range(length)]
        for i, length in enumerate([3, 40, 9, 90, 14, 3, 61, 5])
    ]
    params = [
        SamplingParams(
            temperature=0.9 * (i % 2),
            top_p=[1.0, 0.8][i // 4],
            top_k=[-1, 20][i % 2],
            seed=i,
            max_new_tokens=6 + i,
            frequency_penalty=0.5 * (i % 3),
            logprobs=2,
            prompt_logprobs=None if i % 2 else 1,
        )
        for i in range(len(prompts))
    ]
    shared: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "max_total_tokens": 320,
        "chunked_prefill_size": 48,
        "num_threads": 1,
    }
    one_by_one, overlapped = (
        LLM(str(path), disable_overlap_schedule=disabled, **shared) for disabled in (True, False)
    )
    assert (one_by_one.info.overlap_schedule, overlapped.info.overlap_schedule) == (False, True)
    for ours, expected in zip(
        overlapped.generate(prompts, params), one_by_one.generate(prompts, params), strict=True
    ):
        assert ours.token_ids == expected.token_ids and ours.finish_reason == expected.finish_reason
        assert [e.logprob for e in ours.logprobs] == pytest.approx(
            [e.logprob for e in expected.logprobs], abs=1e-4
        )
    assert (
        overlapped.core.stats().overlapped_steps_total
        > 0
        == one_by_one.core.stats().overlapped_steps_total
    )
    overlapped.core.check()
    assert not overlapped.core.has_work


def test_on_a_cpu_steps_do_not_overlap_unless_asked_to(tmp_path: Path) -> None:
    """There the host is the device: what is launched is done."""
    assert not CpuPlatform.runs_beside_host
    llm = LLM(
        str(make_tiny_model(tmp_path / "model")),
        dtype="float32",
        device="cpu",
        max_total_tokens=256,
        num_threads=1,
    )
    assert not llm.info.overlap_schedule


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
@pytest.mark.parametrize(
    "graphs", [{"disable_cuda_graph": True}, {"cuda_graph_backend_decode": "full"}], ids=str
)
def test_a_launch_never_waits_for_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graphs: dict[str, Any]
) -> None:
    path = make_tiny_model(tmp_path / "model")
    shared: dict[str, Any] = {
        "dtype": "float32",
        "device": "cuda",
        "max_total_tokens": 4096,
        "max_running_requests": 8,
        **graphs,
    }
    prompts = [
        [(17 * i + 3 * j) % 400 for j in range(length)] for i, length in enumerate([3, 40, 9, 90])
    ]
    params = SamplingParams(
        temperature=0.0, max_new_tokens=12, ignore_eos=True, frequency_penalty=0.5, logprobs=2
    )
    one_by_one, overlapped = (
        LLM(str(path), disable_overlap_schedule=disabled, **shared) for disabled in (True, None)
    )
    expected = one_by_one.generate(prompts, params)
    # Kernels are compiled and memory is found at the first steps.
    overlapped.generate(prompts, params)
    launch = EngineCore._launch

    def checked(*arguments: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(EngineCore, "_launch", checked)
    ours = overlapped.generate(prompts, params)
    assert [one.token_ids for one in ours] == [one.token_ids for one in expected]
    assert overlapped.core.stats().overlapped_steps_total > 0
