"""Whatever becomes of the compiling process, the engine neither traces nor compiles: it loads what
is there, and says what is not.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch._dynamo
from sparse import sparse
from tiny_models import make_tiny_model

from piecework.compilation import piece_maker
from piecework.compilation.cache import CompileCache
from piecework.compilation.compiler import EagerCompiler, InductorCompiler
from piecework.compilation.piece_store import weight_bytes
from piecework.kernels.cpu.platform import CpuPlatform
from piecework.runtime.config.engine import Backend, EngineConfig
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.engine import graph_startup
from piecework.runtime.graphs import compile_pieces, compile_process
from piecework.runtime.graphs.compile_process import CompileProcess
from piecework.runtime.llm import LLM, Completion
from piecework.runtime.loader.hollow import hollow_model
from piecework.runtime.loader.loader import empty_model

FAULTY = Path(__file__).parent / "faulty_compile.py"
PROMPTS = [[7, 9, 11] * 5, [3]]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=5, ignore_eos=True)
NO_PIECES = {
    "all pieces": ("compile_failed", "an op without a lowering"),
    "no memory": ("compile_failed", ""),
    "untraceable": ("trace_failed", "no way"),
    "full disk": ("compile_failed", "File too large"),
    "disk full in the end": ("not_in_cache", "lacks"),
    "other keys": ("not_in_cache", "lacks"),
    "damaged": ("not_in_cache", "lacks"),
}
"""By fault, the reason that is counted, and what the line in the log says."""
USUAL = ("untraceable",)
"""Those of the default run. Each starts a process that compiles, which takes seconds."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), num_hidden_layers=2)


@pytest.fixture(scope="module")
def expected(path: Path) -> list[Completion]:
    return engine(path, disable_cuda_graph=True).generate(PROMPTS, GREEDY)


@pytest.fixture
def only_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever would trace or compile in this process is an error."""

    def made(*_: Any) -> None:
        raise AssertionError("traced or compiled in the process that serves")

    monkeypatch.setattr(piece_maker, "trace", made)
    monkeypatch.setattr(torch, "compile", made)
    for compiler in (EagerCompiler, InductorCompiler):
        monkeypatch.setattr(compiler, "compile", made)


def engine(path: Path, **others: Any) -> LLM:
    settings = {
        "dtype": "float32",
        "max_total_tokens": 512,
        "context_length": 128,
        "num_threads": 1,
    }
    return LLM(str(path), **settings | others)


def in_pieces(path: Path) -> LLM:
    return engine(
        path,
        piecewise_cuda_graph=True,
        piecewise_cuda_graph_compiler="eager",
        cuda_graph_backend_decode="disabled",
    )


def seed(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setattr(compile_process, "COMMAND", (sys.executable, str(FAULTY), fault))


def check(llm: LLM, expected: list[Completion]) -> None:
    assert [completion.token_ids for completion in llm.generate(PROMPTS, GREEDY)] == [
        completion.token_ids for completion in expected
    ]


@pytest.mark.parametrize(
    "fault",
    sparse(NO_PIECES, kept=USUAL),
)
def test_without_pieces_steps_stay_eager_with_one_line_and_a_reason_that_is_counted(
    path: Path,
    expected: list[Completion],
    only_loads: None,
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    seed(monkeypatch, fault)
    traced = torch._dynamo.convert_frame.FRAME_COUNTER
    llm = in_pieces(path)
    check(llm, expected)
    assert_told(llm, *NO_PIECES[fault], caplog)
    assert traced == torch._dynamo.convert_frame.FRAME_COUNTER


def assert_told(llm: LLM, reason: str, text: str, caplog: pytest.LogCaptureFixture) -> None:
    stats = llm.core.stats()
    assert stats.graph_fallbacks_total == {reason: stats.steps_total}
    (line,) = [record.getMessage() for record in caplog.records if "pieces" in record.getMessage()]
    assert "steps run eagerly" in line and text in line and "--disable-piecewise-cuda-graph" in line


@pytest.mark.slow
def test_a_piece_that_cannot_be_compiled_runs_as_traced_and_no_later_start_tries_it_again(
    path: Path,
    expected: list[Completion],
    only_loads: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    seed(monkeypatch, "one piece")
    for _ in range(2):
        caplog.clear()
        llm = in_pieces(path)
        check(llm, expected)
        assert llm.info.graphs.distinct_pieces == 3 and llm.core.stats().graph_fallbacks_total == {}
        (line,) = [
            record.getMessage()
            for record in caplog.records
            if record.levelno >= logging.WARNING and "piece" in record.getMessage()
        ]
        assert "piece 1 of 3" in line and "an op without a lowering" in line
        # The second start finds all of it, also what cannot be compiled.
        monkeypatch.setattr(
            graph_startup, "start", lambda *_: pytest.fail("a compiling process was started")
        )


@pytest.mark.slow
def test_what_the_pieces_depend_on_is_told_to_the_compiling_process(
    path: Path, own_cache: Path, only_loads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that has the memory to pack the hollow model's weights, which share one address,
    and not the real model's.
    """
    asked: list[int] = []

    def packs_linear(platform: CpuPlatform, weight_bytes: int) -> bool:
        asked.append(weight_bytes)
        return True

    monkeypatch.setattr(CpuPlatform, "packs_linear", packs_linear)
    llm = in_pieces(path)
    assert llm.info.graphs.distinct_pieces == 3, (
        "the process has made what the engine looks for, or this would be 0"
    )
    assert asked == [llm.info.weight_bytes]


@pytest.mark.parametrize("tied", [False, True])
def test_a_hollow_model_weighs_what_the_real_one_does(tmp_path: Path, tied: bool) -> None:
    llm = engine(
        make_tiny_model(tmp_path / "model", tie_word_embeddings=tied), disable_cuda_graph=True
    )
    config, device = llm.core._runner.model_config, torch.device("cpu")  # type: ignore[attr-defined]
    real, hollow = (
        empty_model(config, torch.float32, device),
        hollow_model(config, torch.float32, device),
    )
    assert weight_bytes(real) == weight_bytes(hollow) == llm.info.weight_bytes


@pytest.mark.skipif(not hasattr(os, "nice"), reason="this system has no niceness")
def test_a_compiling_process_gives_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(os, "nice", asked.append)
    monkeypatch.setattr(compile_pieces, "_OOM_SCORE", tmp_path / "oom_score_adj")
    monkeypatch.setattr(compile_pieces, "_compile", lambda job: None)
    assert compile_pieces.main(['{"niceness": null}']) == 0
    assert asked == [10] and (tmp_path / "oom_score_adj").read_text() == "1000"


def test_a_compiling_process_that_is_stopped_leaves_no_child(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        compile_process, "COMMAND", (sys.executable, "-c", "import time; time.sleep(600)")
    )
    process = CompileProcess("{}")
    assert process.poll() is None
    process.stop()
    outcome = process.wait()
    assert outcome.reason == "compile_failed" and "SIGKILL" in outcome.text


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_steps_eager_and_no_lasting_entry(
    path: Path,
    expected: list[Completion],
    own_cache: Path,
    only_loads: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with monkeypatch.context() as killed:
        seed(killed, "killed")
        llm = in_pieces(path)
        check(llm, expected)
        assert_told(llm, "compile_failed", "was ended by SIGKILL", caplog)
    assert in_pieces(path).info.graphs.distinct_pieces == 3
    assert not any("failed" in entry.about for entry in CompileCache(own_cache).entries())


@pytest.mark.parametrize("wanted", [None, "definitely-no-compiler"])
def test_without_a_cpp_compiler_no_process_is_started_and_one_line_says_what_to_install(
    path: Path,
    expected: list[Completion],
    only_loads: None,
    wanted: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if wanted is None:
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setattr(shutil, "which", lambda name: None)
    else:
        monkeypatch.setenv("CXX", wanted)
    monkeypatch.setattr(
        graph_startup, "start", lambda *_: pytest.fail("a compiling process was started")
    )
    llm = engine(
        path,
        piecewise_cuda_graph=True,
        piecewise_cuda_graph_compiler="inductor",
        attention_backend="torch",
    )
    check(llm, expected)
    assert set(llm.core.stats().graph_fallbacks_total) == {"compile_failed"}
    (line,) = [record.getMessage() for record in caplog.records if "pieces" in record.getMessage()]
    assert (wanted or "g++") in line and "install" in line and "$CXX" in line


def test_a_server_runs_in_pieces_unless_told_otherwise_and_a_script_does_not(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert EngineConfig().prefill_backend is Backend.PIECEWISE
    for off in (
        {"disable_piecewise_cuda_graph": True},
        {"disable_cuda_graph": True},
        {"cuda_graph_backend_prefill": "disabled"},
    ):
        assert EngineConfig(**off).prefill_backend is Backend.DISABLED
    monkeypatch.setattr(
        graph_startup, "start", lambda *_: pytest.fail("a compiling process was started")
    )
    assert engine(path).info.graphs.prefill_backend == "disabled"
