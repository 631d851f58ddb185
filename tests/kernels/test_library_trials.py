"""Kernels of libraries are tried by another process: what ends it, or its context, costs that
kernel and nothing else.
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

import library_ops_standin
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from piecework.kernels import reference
from piecework.kernels.attention import KVLayout
from piecework.kernels.cache_folder import verdicts_folder
from piecework.kernels.cuda import ops as cuda_ops
from piecework.kernels.cuda import platform as cuda_platform
from piecework.kernels.cuda import trial_process
from piecework.kernels.cuda.ops import Libraries
from piecework.kernels.cuda.platform import CudaPlatform
from piecework.kernels.cuda.trial_process import Trials

STAND_IN = Path(__file__).parent / "trial_standin.py"
X, WEIGHT = torch.linspace(-2, 2, 96).view(6, 16).bfloat16(), torch.linspace(0, 1, 16).bfloat16()
LAYOUT = KVLayout.of_heads(8, 2, 64, torch.bfloat16)
ROWS, ROW = (
    {"shape": [4, 16], "stride": [16, 1], "dtype": "bfloat16"},
    {"shape": [16], "stride": [1], "dtype": "bfloat16"},
)
NORM = {"library": "sgl-kernel", "call": "rms_norm", "arguments": [ROWS, ROW, 1e-5]}
GATE = {"library": "sgl-kernel", "call": "silu_and_mul", "arguments": [ROWS]}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", str(tmp_path))


def seed(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setattr(trial_process, "COMMAND", (sys.executable, str(STAND_IN), fault))


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        # Of a signal the default run has attention's below, of a poisoned context the verdicts'.
        pytest.param("segfault", "was ended by SIGSEGV", marks=pytest.mark.slow),
        pytest.param(
            "poisoned", "an illegal memory access was encountered", marks=pytest.mark.slow
        ),
        pytest.param("hangs", "gave no answer within", marks=pytest.mark.slow),
        pytest.param("import ends it", "ended with exit code 66", marks=pytest.mark.slow),
    ],
)
def test_a_kernel_that_ends_the_process_or_its_context_is_left_out_and_the_next_has_a_new_process(
    fault: str, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seed(monkeypatch, fault)
    # A process imports torch first, which is no part of the trial that hangs.
    monkeypatch.setattr(trial_process, "_TRIAL_SECONDS", 15.0)
    monkeypatch.setattr(cuda_ops.triton_ops, "rms_norm", reference.rms_norm)
    trials = Trials("cpu")
    monkeypatch.setattr(
        cuda_ops, "_libraries", Libraries([library_ops_standin.sgl_kernel()], trials)
    )
    for _ in range(2):
        assert torch.equal(cuda_ops.rms_norm(X, WEIGHT, 1e-5), reference.rms_norm(X, WEIGHT, 1e-5))
    (line,) = [
        record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
    ]
    assert (
        "sgl-kernel is installed but does not work here: its rms_norm is not used" in line
        and reason in line
    )
    other = trials.failure(GATE)
    assert (other is None) == (fault != "import ends it")
    trials.end()


def test_attention_that_ends_the_process_is_tritons(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seed(monkeypatch, "attention segfaults")
    monkeypatch.setattr(cuda_platform, "has_flashinfer", lambda: True)
    monkeypatch.setattr(cuda_platform, "TRIALS", Trials("cpu"))
    assert CudaPlatform().choose_attention("auto", [LAYOUT]) == "triton"
    assert "flashinfer is not used: the process that tried it was ended by SIGSEGV" in caplog.text


def test_a_verdict_is_kept_for_the_next_start_a_failure_for_a_day(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seed(monkeypatch, "poisoned")
    first = Trials("cpu")
    assert (
        first.import_failure("sgl-kernel") is None
        and first.failure(NORM)
        and first.failure(GATE) is None
    )
    first.end()
    assert len(list(verdicts_folder().iterdir())) == 3

    monkeypatch.setattr(trial_process, "COMMAND", (sys.executable, "-c", "raise SystemExit(1)"))
    second = Trials("cpu")
    second.begin(["sgl-kernel"])
    assert second.import_failure("sgl-kernel") is second.failure(GATE) is None
    assert "illegal memory access" in str(second.failure(NORM))
    assert second._process is None, "nothing was tried"

    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 25 * 3600)
    third = Trials("cpu")
    assert third.failure(GATE) is None and "exit code 1" in str(third.failure(NORM)), (
        "the failure is tried anew"
    )
    with monkeypatch.context() as upgraded:
        upgraded.setattr(
            trial_process, "_version", lambda name: "0.4.9" if name == "sglang-kernel" else None
        )
        assert "exit code 1" in str(Trials("cpu").failure(GATE)), "so is another version"
    monkeypatch.setattr(torch, "__version__", "another")
    assert "exit code 1" in str(Trials("cpu").failure(GATE)), "so is everything with another torch"


def test_kernels_that_compute_what_torch_does_are_used_and_after_the_start_none_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seed(monkeypatch, "none")
    trials = Trials("cpu")
    trials.begin(["sgl-kernel"])
    assert trials.import_failure("sgl-kernel") is trials.failure(NORM) is None
    trials.end()
    assert (
        trials.failure(NORM) is None
        and "not tried" in str(trials.failure(GATE))
        and trials._process is None
    )


def test_a_build_of_minutes_says_which_kernel_and_for_how_long(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    seed(monkeypatch, "builds")
    monkeypatch.setattr(trial_process, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(trial_process, "_REPORT_SECONDS", 0.2)
    trials = Trials("cpu")
    assert trials.failure(NORM) is None
    trials.end()
    lines = [line for line in capfd.readouterr().err.splitlines() if "so far" in line]
    assert any(
        line.startswith("building batch_prefill of sgl-kernel, once on this machine: ")
        for line in lines
    )


@pytest.mark.parametrize(
    ("visible", "index", "expected"),
    [(None, 0, None), ("4,5", 0, "4,5"), ("4,5", 1, "5"), (None, 1, "1")],
)
def test_a_rank_tries_kernels_on_its_own_gpu(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, index: int, expected: str | None
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert trial_process._environment(index).get("CUDA_VISIBLE_DEVICES") == expected
