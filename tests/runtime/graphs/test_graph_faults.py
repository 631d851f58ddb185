"""Whatever goes wrong around graphs, and whenever a request comes, the answers are eager's; nothing
is traced while serving.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_here import CompiledHere
from graph_engines import (
    LAYERS,
    PARAMS,
    PROMPTS,
    SIZES,
    Inbox,
    check_answers,
    engine,
    logits,
    look_when_done,
    pieces,
    settings,
)
from recording_platform import RecordingPlatform
from tiny_models import make_tiny_model

from piecework.compilation import piece_maker
from piecework.compilation.cache import CompileCache
from piecework.compilation.compiler import EagerCompiler
from piecework.compilation.plan import Plan
from piecework.compilation.recording import Recorder
from piecework.kernels.cpu.platform import CpuPlatform
from piecework.runtime.config.engine import EngineConfig
from piecework.runtime.engine import graph_startup
from piecework.runtime.engine.build import build_engine
from piecework.runtime.executor import model_runner
from piecework.runtime.llm import Completion


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def shared_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for all tests that leave it as it is: a model's pieces are compiled once."""
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", str(cache))


@pytest.fixture
def own_cache(tmp_path: Path, shared_cache: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def expected(path: Path) -> list[Completion]:
    return [engine(path).generate([prompt], PARAMS)[0] for prompt in PROMPTS]


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> RecordingPlatform:
    platform = RecordingPlatform()
    monkeypatch.setattr(model_runner, "detect", lambda name: platform)
    return platform


# Every logit at every size and its neighbours


@pytest.mark.parametrize(
    ("architecture", "platform"),
    [
        ("qwen3", RecordingPlatform),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                *(
                    ("llama", CpuPlatform),
                    ("mistral", CpuPlatform),
                    ("qwen2", CpuPlatform),
                    ("qwen3", CpuPlatform),
                ),
                *((name, RecordingPlatform) for name in ("llama", "mistral", "qwen2")),
            )
        ),
    ],
)
def test_logits_with_graphs_are_those_without(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compiled_here: None,
    architecture: str,
    platform: type[CpuPlatform],
) -> None:
    path = make_tiny_model(tmp_path / "model", architecture, num_hidden_layers=LAYERS)
    eager = engine(path, disable_radix_cache=True)
    machine = platform()
    machine.padding_limit = 8.0
    monkeypatch.setattr(model_runner, "detect", lambda name: machine)
    llm = engine(path, disable_radix_cache=True, **pieces())
    assert llm.info.graphs.prefill_sizes == SIZES
    for prompt in PROMPTS:
        torch.testing.assert_close(logits(llm, prompt), logits(eager, prompt), rtol=0, atol=1e-4)
    assert llm.core.stats().graph_replays_total == len(PROMPTS) - 1, (
        "all but the one above the largest size"
    )


# Captures that fail


# Each size, each piece and each error in the default run.
@pytest.mark.parametrize(
    ("number", "piece"),
    [
        pytest.param(number, piece, marks=[pytest.mark.slow] * ((number + piece) % 3 > 0))
        for number in range(len(SIZES))
        for piece in range(LAYERS + 1)
    ],
)
def test_a_capture_that_fails_at_a_size_and_a_piece(
    path: Path,
    expected: list[Completion],
    recording: RecordingPlatform,
    compiled_here: None,
    piece: int,
    number: int,
) -> None:
    # Each error at every size, and at every piece.
    errors = RuntimeError("no capture today"), torch.OutOfMemoryError("out of memory")
    error = errors[(piece + number) % 2]
    # A failed capture ends its size, so the captures before it are those of whole sizes.
    recording.fail_at = {number * (LAYERS + 1) + piece: error}
    llm = engine(path, **pieces())
    assert len(llm.info.graphs.failed_sizes) == 1
    assert len(llm.info.graphs.prefill_sizes) == len(SIZES) - 1
    check_answers(llm, expected)


def test_no_capture_succeeds(
    path: Path, expected: list[Completion], recording: RecordingPlatform, compiled_here: None
) -> None:
    recording.fail_at = dict.fromkeys(range(100), torch.OutOfMemoryError("out of memory"))
    llm = engine(path, **pieces())
    assert llm.info.graphs.failed_sizes == dict.fromkeys(map(str, SIZES), "out_of_memory")
    check_answers(llm, expected)


@pytest.mark.parametrize("piece", range(LAYERS + 1))
def test_a_wrong_graph_of_a_piece_is_found_out(
    path: Path,
    expected: list[Completion],
    recording: RecordingPlatform,
    compiled_here: None,
    piece: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Seeded: at every size, the graph of one piece computes something else than the piece does."""
    graph = Recorder.graph

    def wrong(recorder: Recorder, work: Callable[[], Any], label: str) -> list[torch.Tensor]:
        is_wrong = label == f"piece {2 * piece}"
        return graph(
            recorder,
            (lambda: [output * 1.1 + 0.3 for output in work()]) if is_wrong else work,
            label,
        )

    monkeypatch.setattr(Recorder, "graph", wrong)
    llm = engine(path, **pieces())
    assert llm.info.graphs.failed_sizes == dict.fromkeys(map(str, SIZES), "wrong_result")
    assert "differs" in caplog.text
    check_answers(llm, expected)


# Each piece and each platform in the default run.
@pytest.mark.parametrize(
    ("piece", "platform"),
    [
        pytest.param(piece, platform, marks=[pytest.mark.slow] * ((piece + number) % 2))
        for piece in range(LAYERS + 1)
        for number, platform in enumerate((CpuPlatform, RecordingPlatform))
    ],
)
def test_a_piece_that_is_compiled_wrong_is_found_out(
    path: Path,
    expected: list[Completion],
    compiled_here: None,
    piece: int,
    platform: type[CpuPlatform],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Seeded: what the compiler made of one piece computes something else, with graphs and
    without.
    """
    monkeypatch.setattr(model_runner, "detect", lambda name: platform())
    load, loaded = EagerCompiler.load, []

    def wrong(compiler: EagerCompiler, file: Path) -> Any:
        run = load(compiler, file)
        loaded.append(file)
        return (
            (lambda inputs: [output * 1.1 + 0.3 for output in run(inputs)])
            if len(loaded) % 3 == piece
            else run
        )

    # From here on the engine loads what CompiledHere has put into the cache, each of three pieces
    # once.
    monkeypatch.setattr(EagerCompiler, "load", wrong)
    llm = engine(path, **pieces(piecewise_cuda_graph_tokens=None))
    check_answers(llm, expected)
    assert llm.info.graphs.distinct_pieces == 0
    assert "differ" in caplog.text and "--" in caplog.text


# The cache


# What else may be in a file is seen by the maker of pieces, whose tests have it.
@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(b"", id="empty", marks=pytest.mark.slow),
        pytest.param(b"garbage", id="garbage", marks=pytest.mark.slow),
        pytest.param(None, id="half"),
    ],
)
def test_a_cache_whose_every_file_is_damaged_is_made_anew(
    path: Path,
    expected: list[Completion],
    own_cache: Path,
    compiled_here: None,
    damage: bytes | None,
) -> None:
    engine(path, **pieces())
    for file in own_cache.iterdir():
        if file.is_file():
            file.write_bytes(
                file.read_bytes()[: file.stat().st_size // 2] if damage is None else damage
            )
    llm = engine(path, **pieces())
    assert llm.info.graphs.distinct_pieces == 3
    assert len(CompileCache(own_cache).entries()) == 4
    check_answers(llm, expected)


def test_a_cache_that_is_emptied_between_compiling_and_loading(
    path: Path, expected: list[Completion], own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled_and_cleared(*job: Any) -> CompiledHere:
        process = CompiledHere(*job)
        CompileCache(own_cache).clear()
        return process

    monkeypatch.setattr(graph_startup, "start", compiled_and_cleared)
    check_answers(engine(path, **pieces()), expected)


@pytest.mark.slow
def test_two_engines_start_on_one_cache(
    path: Path, expected: list[Completion], own_cache: Path
) -> None:
    """Their compiling processes, real ones, run at the same time."""
    engines = [
        build_engine(EngineConfig(model_path=str(path), **settings(**pieces())), progress=False)
        for _ in range(2)
    ]
    for found in engines:
        found.startup.complete()
    # The plan is another one where other tests of this process have registered split ops of theirs.
    assert [entry.about["kind"] for entry in CompileCache(own_cache).entries()].count("piece") == 3
    for found in engines:
        assert found.runner.info().graphs.prefill_sizes == SIZES
        outputs = Inbox([(0, PROMPTS[4])]).serve(found)
        assert outputs["0"] == expected[4].token_ids


# Requests at every moment of the start-up


@pytest.mark.parametrize(
    ("backend", "stride"),
    [
        # At each second moment there is a first request or, by turns, a second one.
        ("piecewise", 8),
        pytest.param("piecewise", 1, marks=pytest.mark.slow),
        pytest.param("breakable", 1, marks=pytest.mark.slow),
    ],
)
def test_a_request_at_each_moment_of_the_start_up(
    path: Path,
    expected: list[Completion],
    recording: RecordingPlatform,
    compiled_here: None,
    backend: str,
    stride: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moments = look_when_done(path)
    assert moments > len(SIZES) + 2

    def traced(*_: Any) -> None:
        raise AssertionError("traced in the process that serves")

    monkeypatch.setattr(piece_maker, "trace", traced)
    flags = pieces(
        cuda_graph_backend_decode="full", cuda_graph_bs="1,2", cuda_graph_backend_prefill=backend
    )
    config = EngineConfig(
        model_path=str(path), **settings(**flags | {"piecewise_cuda_graph": False})
    )
    for moment in range(0, moments, stride):
        found = build_engine(config, progress=False)
        # A second one while the first is decoding.
        arrivals = [
            (moment, PROMPTS[moment % len(PROMPTS)]),
            (moment + 2, PROMPTS[(moment + 4) % len(PROMPTS)]),
        ]
        tokens = Inbox(arrivals).serve(found)
        for number, (_, prompt) in enumerate(arrivals):
            assert tokens[str(number)] == expected[PROMPTS.index(prompt)].token_ids, (
                f"at moment {moment}"
            )
        graphs = found.runner.info().graphs
        assert (graphs.prefill_sizes, graphs.decode_sizes, graphs.failed_sizes) == (
            SIZES,
            [1, 2],
            {},
        )


# Nothing is traced or compiled while serving


@pytest.mark.slow
def test_nothing_is_traced_or_compiled_in_the_process_that_serves(
    path: Path, own_cache: Path
) -> None:
    """A whole cold start and steps of many lengths: tracing and compiling have run in the other
    process alone.
    """
    program = (
        "import sys, json, torch\nfrom piecework.runtime.llm import LLM\nfrom "
        "piecework.runtime.core.sampling_params import SamplingParams\n"
        f"llm = LLM({str(path)!r}, **{settings(**pieces())!r})\n"
        "params = SamplingParams(temperature=0.0, max_new_tokens=3, ignore_eos=True)\n"
        "for length in (1, 2, 3, 5, 8, 16, 17, 40, 63, 64, 65, 100): llm.generate([[7] * length], "
        "params)\n"
        "stats = llm.core.stats()\n"
        "import torch._dynamo\n"
        "seen, compiler = torch._dynamo.convert_frame.FRAME_COUNTER, 'torch._inductor.compile_fx' "
        "in sys.modules\n"
        "torch.compile(lambda x: x + 1, backend='eager')(torch.ones(2))\n"
        "counts = torch._dynamo.convert_frame.FRAME_COUNTER > seen\n"
        "print(json.dumps([seen, compiler, counts, stats.piecewise_steps_total, stats.steps_total, "
        "llm.info.graphs.prefill_sizes]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    seen, compiler, counts, in_pieces, steps, sizes = json.loads(done.stdout)
    assert (seen, compiler, sizes) == (0, False, SIZES)
    assert counts, "what is counted is what Dynamo traces"
    assert in_pieces == steps >= 36


# A check of pieces


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_plan_that_calls_a_piece_with_another_layer_s_weights_is_found_out(
    path: Path,
    compiled_here: None,
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    read = Plan.from_json

    def mixed_up(data: dict[str, Any]) -> Plan:
        plan = read(data)
        other = {"layers.0.mlp": "layers.1.mlp", "layers.1.mlp": "layers.0.mlp"}
        names = {
            n: next((name.replace(a, b) for a, b in other.items() if a in name), name)
            for n, name in plan.weights.items()
        }
        assert names != plan.weights
        return replace(plan, weights=names)

    monkeypatch.setattr(Plan, "from_json", mixed_up)
    llm = engine(
        path,
        **pieces(piecewise_cuda_graph_tokens=None) | {"dtype": dtype, "attention_backend": "torch"},
    )
    assert llm.info.graphs.distinct_pieces == 0
    assert "what was traced differs from the model" in caplog.text


def test_a_piece_is_tried_on_the_longest_step_only_while_no_request_runs(
    path: Path, compiled_here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = build_engine(EngineConfig(model_path=str(path), **settings(**pieces())), progress=False)
    prefill = found.runner.graphs.base.prefill
    assert prefill is not None
    check, tried = prefill.check, []

    def watched(forward: Any) -> Any:
        for long in check(forward):
            yield long
            tried.append(long)

    monkeypatch.setattr(prefill, "check", watched)
    for _ in range(200):
        found.startup.advance(busy=True)
    assert tried and not any(tried) and found.startup.pending
    found.startup.complete()
    assert any(tried) and found.runner.info().graphs.distinct_pieces == 3
    found.runner.close()


def test_the_longest_step_is_tried_in_the_end_although_requests_run(
    path: Path, compiled_here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_startup, "_PATIENCE_SECONDS", 0.0)
    found = build_engine(EngineConfig(model_path=str(path), **settings(**pieces())), progress=False)
    for _ in range(200):
        found.startup.advance(busy=True)
    assert not found.startup.pending and found.runner.info().graphs.distinct_pieces == 3
    found.runner.close()
