"""Steps in pieces: the same tokens and log-probabilities as eager, at captured sizes and beside
them, and eager where pieces fail.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_here import CompiledHere
from recording_platform import RecordingPlatform
from tiny_models import make_tiny_model

from piecework.compilation import piece_maker
from piecework.compilation.capture import Graphs
from piecework.compilation.core.errors import CaptureError, TraceError
from piecework.kernels.attention import AttentionMetadata
from piecework.kernels.cpu.platform import CpuPlatform
from piecework.runtime.config.engine import EngineConfig
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.engine import graph_startup
from piecework.runtime.executor import model_runner
from piecework.runtime.graphs import full_prefill
from piecework.runtime.graphs.rows_apart import rows_apart
from piecework.runtime.llm import LLM, Completion

SIZES = (4, 16, 33)
LENGTHS = [length + offset for length in SIZES for offset in (-1, 0, 1)]
PROMPTS = [[(17 * i + 3 * j) % 400 for j in range(length)] for i, length in enumerate(LENGTHS)]
# Shorter than most prompts.
WINDOWS: dict[str, dict[str, Any]] = {
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "mistral": {"sliding_window": 8},
}
RECORDED = (
    ("piecewise", "qwen3"),
    ("breakable", "llama"),
    ("full", "mistral"),
    ("disabled", "llama"),
)
"""What the default run records."""
PARAMS = SamplingParams(
    temperature=0.0, max_new_tokens=6, ignore_eos=True, logprobs=5, prompt_logprobs=0
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def shared_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for all tests that leave it as it is: an architecture's pieces are compiled once."""
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", str(cache))


@pytest.fixture
def own_cache(tmp_path: Path, shared_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", str(tmp_path / "cache"))


def engine(path: Path, **settings: Any) -> LLM:
    common = {"dtype": "float32", "max_total_tokens": 1024, "num_threads": 1}
    return LLM(str(path), **{**common, **settings})


def in_pieces(path: Path, **settings: Any) -> LLM:
    return engine(
        path, piecewise_cuda_graph=True, **{"piecewise_cuda_graph_compiler": "eager", **settings}
    )


def graph_of(llm: LLM) -> Any:
    return llm.core._runner.graphs.base.prefill  # type: ignore[attr-defined]


def assert_same(ours: list[Completion], eager: list[Completion]) -> None:
    for one, other in zip(ours, eager, strict=True):
        assert one.token_ids == other.token_ids
        said = [
            entry.logprob
            for entry in [*(one.prompt_logprobs or []), *one.logprobs]
            if entry is not None
        ]
        wanted = [
            entry.logprob
            for entry in [*(other.prompt_logprobs or []), *other.logprobs]
            if entry is not None
        ]
        assert said == pytest.approx(wanted, abs=1e-4)


# Unpadded steps run the same pieces, whatever the family. Qwen2's layers here are Llama's with a
# bias, and all but the first with a window, as Mistral's.
@pytest.mark.parametrize(
    ("sizes", "architecture"),
    [
        ("4,16,33", "qwen2"),
        *(
            pytest.param("4,16,33", family, marks=pytest.mark.slow)
            for family in ("llama", "mistral", "qwen3")
        ),
        *(pytest.param(None, family, marks=pytest.mark.slow) for family in ("llama", "qwen3")),
    ],
)
def test_pieces_give_what_eager_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, sizes: str | None
) -> None:
    monkeypatch.setattr(graph_startup, "start", CompiledHere)
    path = make_tiny_model(tmp_path / "model", architecture, **WINDOWS.get(architecture, {}))
    llm = in_pieces(path, piecewise_cuda_graph_tokens=sizes)
    alone = [llm.generate([prompt], PARAMS)[0] for prompt in PROMPTS]
    assert_same(alone, [engine(path).generate([prompt], PARAMS)[0] for prompt in PROMPTS])
    assert_same(llm.generate(PROMPTS, PARAMS), alone)
    stats = llm.core.stats()
    assert stats.piecewise_steps_total == stats.steps_total > len(PROMPTS)
    assert (stats.graph_replays_total > 0) == (sizes is not None)


@pytest.mark.usefixtures("compiled_here")
def test_equal_layers_are_one_piece(tmp_path: Path) -> None:
    shallow = graph_of(in_pieces(make_tiny_model(tmp_path / "a", num_hidden_layers=3))).num_pieces
    deep = graph_of(in_pieces(make_tiny_model(tmp_path / "b", num_hidden_layers=5))).num_pieces
    assert shallow == deep == 3


@pytest.mark.usefixtures("own_cache", "compiled_here")
def test_a_second_start_traces_and_compiles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_tiny_model(tmp_path / "model")
    first = in_pieces(path).generate(PROMPTS, PARAMS)

    def needless(*_: Any) -> None:
        raise AssertionError(
            "traced, or a compiling process started, although the cache holds all of it"
        )

    monkeypatch.setattr(piece_maker, "trace", needless)
    monkeypatch.setattr(graph_startup, "start", needless)
    second = in_pieces(path)
    assert_same(second.generate(PROMPTS, PARAMS), first)
    assert graph_of(second).num_pieces == 3


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_here", "own_cache")
def test_pieces_round_activations_as_this_start_is_told(tmp_path: Path) -> None:
    """Weights and their names are the same, and the cache holds what another start has made."""
    path = make_tiny_model(tmp_path / "model")
    settings: dict[str, Any] = {
        "dtype": "bfloat16",
        "quantization": "q8_0",
        "cuda_graph_backend_decode": "disabled",
        "max_total_tokens": 1024,
        "num_threads": 1,
        "disable_radix_cache": True,
    }
    params = SamplingParams(temperature=0.0, max_new_tokens=1, prompt_logprobs=0)

    def said(activations: str, **others: Any) -> list[float]:
        llm = LLM(str(path), cpu_activations=activations, **settings, **others)
        (one,) = llm.generate([PROMPTS[-1]], params)
        if others:
            assert graph_of(llm).num_pieces > 0
        return [entry.logprob for entry in one.prompt_logprobs or [] if entry is not None]

    cut = {
        "piecewise_cuda_graph": True,
        "piecewise_cuda_graph_compiler": "eager",
        "passes": "none",
    }
    rounded, exact = said("int8"), said("bf16")
    assert rounded != exact
    assert said("int8", **cut) == rounded
    assert said("bf16", **cut) == exact


@pytest.mark.usefixtures("compiled_here", "own_cache")
def test_a_model_that_cannot_be_traced_runs_eagerly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_tiny_model(tmp_path / "model")

    def fails(*_: Any) -> None:
        raise TraceError("no way")

    monkeypatch.setattr(piece_maker, "trace", fails)
    llm = in_pieces(path)
    assert_same(llm.generate(PROMPTS, PARAMS), engine(path).generate(PROMPTS, PARAMS))
    assert graph_of(llm).num_pieces == 0
    assert "run eagerly" in caplog.text and "no way" in caplog.text


@pytest.mark.usefixtures("own_cache")
def test_a_cache_folder_that_cannot_be_leaves_steps_eager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_tiny_model(tmp_path / "model")
    (tmp_path / "cache").write_text("a file where the cache's folder should be")
    llm = in_pieces(path)
    assert_same(llm.generate(PROMPTS, PARAMS), engine(path).generate(PROMPTS, PARAMS))
    assert "File exists" in caplog.text


@pytest.mark.usefixtures("compiled_here")
def test_a_size_whose_capture_fails_runs_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_tiny_model(tmp_path / "model")
    record = Graphs._record

    def fails_at_16(graphs: Graphs, size: int, *rest: Any) -> Any:
        if size == 16:
            raise CaptureError("seeded")
        return record(graphs, size, *rest)

    monkeypatch.setattr(Graphs, "_record", fails_at_16)
    llm = in_pieces(path, piecewise_cuda_graph_tokens="4,16,33")
    assert graph_of(llm).graphs.captured == [4, 33]
    assert_same(llm.generate(PROMPTS, PARAMS), engine(path).generate(PROMPTS, PARAMS))


@pytest.mark.usefixtures("compiled_here")
def test_captures_write_to_no_page_that_a_request_may_hold(tmp_path: Path) -> None:
    llm = in_pieces(make_tiny_model(tmp_path / "model"), piecewise_cuda_graph_tokens="4,16,33")
    pool = llm.core._runner.pool  # type: ignore[attr-defined]
    assert all(torch.count_nonzero(part[1:]) == 0 for part in [*pool.k, *pool.v])


def lengths_of(llm: LLM) -> Any:
    return llm.core._runner.seen_lengths  # type: ignore[attr-defined]


@pytest.mark.usefixtures("compiled_here", "own_cache")
def test_auto_sizes_are_the_lengths_that_an_earlier_run_has_seen(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "model")
    first = engine(path)
    for prompt in PROMPTS:
        first.generate([prompt], SamplingParams(temperature=0.0, max_new_tokens=1))
    assert dict(lengths_of(first).counts) == dict.fromkeys(LENGTHS, 1)
    first.core._runner.close()  # type: ignore[attr-defined]
    assert in_pieces(path, piecewise_cuda_graph_tokens="auto:3").info.graphs.prefill_sizes == [
        5,
        17,
        34,
    ]


@pytest.mark.usefixtures("compiled_here")
def test_captures_stay_within_the_devices_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two layers are three graphs a size."""
    monkeypatch.setattr(CpuPlatform, "graph_budget", 7)
    llm = in_pieces(
        make_tiny_model(tmp_path / "model", num_hidden_layers=2),
        piecewise_cuda_graph_tokens="4,16,33",
    )
    assert llm.info.graphs.num_graphs == 6
    assert "2 of 3 sizes are captured: the device holds 7 graphs, a size takes 3" in caplog.text


# Devices whose graphs record by address


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> RecordingPlatform:
    platform = RecordingPlatform()
    monkeypatch.setattr(model_runner, "detect", lambda name: platform)
    return platform


@pytest.mark.usefixtures("compiled_here")
@pytest.mark.parametrize(("budget", "prefill_sizes"), [(9, [16, 33]), (8, [33]), (3, [])])
def test_graphs_of_decodes_count_in_the_devices_budget(
    tmp_path: Path,
    recording: RecordingPlatform,
    monkeypatch: pytest.MonkeyPatch,
    budget: int,
    prefill_sizes: list[int],
) -> None:
    """Three batch sizes are three graphs; two layers are three graphs a size."""
    monkeypatch.setattr(recording, "graph_budget", budget, raising=False)
    path = make_tiny_model(tmp_path / "model", num_hidden_layers=2)
    sizes = {"piecewise_cuda_graph_tokens": "4,16,33", "cuda_graph_bs": "1,4,16"}
    graphs = in_pieces(path, piecewise_cuda_graph_compiler="eager", **sizes).info.graphs
    assert (graphs.decode_sizes, graphs.prefill_sizes) == ([1, 4, 16], prefill_sizes)
    assert graphs.num_graphs == 3 + 3 * len(prefill_sizes) <= budget


@pytest.mark.parametrize(
    ("backend", "architecture"),
    [
        pytest.param(*each, marks=[pytest.mark.slow] * (each not in RECORDED))
        for each in product(
            ("piecewise", "breakable", "full", "disabled"), ("llama", "mistral", "qwen2", "qwen3")
        )
    ],
)
@pytest.mark.usefixtures("compiled_here")
def test_recorded_steps_give_what_eager_gives(
    tmp_path: Path, architecture: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_tiny_model(tmp_path / "model", architecture)
    expected = engine(path).generate(PROMPTS, PARAMS)
    platform = RecordingPlatform()
    monkeypatch.setattr(model_runner, "detect", lambda name: platform)
    settings = {
        "cuda_graph_backend_prefill": backend,
        "piecewise_cuda_graph_compiler": "eager",
        "piecewise_cuda_graph_tokens": "4,16,64",
    }
    llm = engine(path, context_length=128, cuda_graph_bs="1,4,16", **settings)
    assert_same(llm.generate(PROMPTS, PARAMS), expected)
    graphs, stats = llm.info.graphs, llm.core.stats()
    assert (graphs.prefill_sizes, graphs.decode_sizes) == (
        [] if backend == "disabled" else [4, 16, 64],
        [1, 4, 16],
    )
    assert (graphs.failed_sizes, graphs.distinct_pieces) == ({}, 3 if backend == "piecewise" else 0)
    # Nine prompts at once are more tokens than the largest size; all their decodes are recorded.
    assert stats.graph_replays_total >= stats.steps_total - 3
    assert stats.prefill_steps_total > 0
    assert (stats.prefill_replay_share > 0) == (backend != "disabled")


def test_a_full_graph_that_gives_other_results_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token is made to see itself alone, which the comparison with eager finds."""
    path = make_tiny_model(tmp_path / "model")
    expected = engine(path).generate(PROMPTS, PARAMS)
    monkeypatch.setattr(model_runner, "detect", lambda name: RecordingPlatform())

    def alone(metadata: AttentionMetadata) -> AttentionMetadata:
        apart = rows_apart(metadata)
        return replace(apart, seq_lens=[1] * len(apart.seq_lens))

    monkeypatch.setattr(full_prefill, "rows_apart", alone)
    llm = engine(
        path,
        context_length=128,
        cuda_graph_backend_prefill="full",
        piecewise_cuda_graph_tokens="4,16",
        cuda_graph_bs="1",
    )
    assert llm.info.graphs.failed_sizes == {"4": "wrong_result", "16": "wrong_result"}
    assert_same(llm.generate(PROMPTS, PARAMS), expected)
    assert llm.core.stats().prefill_replays_total == 0


def test_full_graphs_need_a_device_that_records(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "model")
    with pytest.raises(ValueError, match="prefill full needs a device that records graphs"):
        engine(path, cuda_graph_backend_prefill="full")


def test_full_graphs_need_a_model_without_recurrent_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_tiny_model(tmp_path / "model", "mamba2", num_heads=4, head_dim=32, n_groups=2)
    monkeypatch.setattr(model_runner, "detect", lambda name: RecordingPlatform())
    with pytest.raises(ValueError, match="without sparse attention and recurrent states"):
        engine(path, cuda_graph_backend_prefill="full")


@pytest.mark.usefixtures("compiled_here", "own_cache")
def test_a_model_that_cannot_be_traced_is_recorded_as_it_runs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recording: RecordingPlatform,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(*_: Any) -> None:
        raise TraceError("no way")

    path = make_tiny_model(tmp_path / "model")
    expected = engine(path, disable_cuda_graph=True).generate(PROMPTS, PARAMS)
    monkeypatch.setattr(piece_maker, "trace", fails)
    llm = in_pieces(path, piecewise_cuda_graph_tokens="4,16,64", context_length=128)
    assert_same(llm.generate(PROMPTS, PARAMS), expected)
    assert llm.info.graphs.prefill_sizes == [4, 16, 64]
    assert "no way" in caplog.text and "--cuda-graph-backend-prefill breakable" in caplog.text


@pytest.mark.usefixtures("compiled_here", "own_cache")
def test_the_largest_size_comes_first_and_then_the_one_that_was_used_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recording: RecordingPlatform
) -> None:
    order: list[int] = []
    capture = Graphs.capture
    monkeypatch.setattr(
        Graphs, "capture", lambda graphs, size: (order.append(size), capture(graphs, size))[1]
    )
    path = make_tiny_model(tmp_path / "model")
    first = engine(path, disable_cuda_graph=True)
    for count, length in ((3, 4), (1, 13), (5, 30)):
        for seed in range(count):
            first.generate(
                [[(seed + 7 * length + i) % 400 for i in range(length)]],
                SamplingParams(temperature=0.0, max_new_tokens=1),
            )
    first.core._runner.close()  # type: ignore[attr-defined]
    in_pieces(
        path, piecewise_cuda_graph_tokens="4,8,16,32,64", cuda_graph_backend_decode="disabled"
    )
    assert order == [64, 32, 4, 16, 8]


def test_breakable_on_a_device_without_graphs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match="--cuda-graph-backend-prefill breakable needs a device that records graphs",
    ):
        engine(make_tiny_model(tmp_path / "model"), cuda_graph_backend_prefill="breakable")


def test_two_prefill_backends_at_once_are_refused() -> None:
    with pytest.raises(ValueError, match="contradicts --cuda-graph-backend-prefill breakable"):
        EngineConfig(piecewise_cuda_graph=True, cuda_graph_backend_prefill="breakable")


@pytest.mark.parametrize(
    ("architecture", "dtype", "layers"),
    [
        *(("llama", "float32", 3), ("llama", "bfloat16", 3), ("qwen3", "bfloat16", 3)),
    ],
)
@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
def test_inductors_pieces_give_the_bits_that_eager_gives(
    architecture: str, dtype: str, layers: int, tmp_path: Path
) -> None:
    """A server answers eagerly until its pieces come in: no client may see that they do."""
    path = make_tiny_model(tmp_path / "model", architecture, num_hidden_layers=layers)
    op_by_op: dict[str, Any] = {"dtype": dtype, "cuda_graph_backend_decode": "disabled"}
    llm = in_pieces(
        path,
        piecewise_cuda_graph_compiler="inductor",
        piecewise_cuda_graph_tokens="16",
        **op_by_op,
    )
    eager = engine(path, **op_by_op)
    for prompt in [[5], *PROMPTS]:
        # One prompt a step: a CPU replays a size for a step of that very size.
        ours, theirs = (each.generate([prompt], PARAMS)[0] for each in (llm, eager))
        assert ours.token_ids == theirs.token_ids
        assert ours.logprobs == theirs.logprobs
        assert ours.prompt_logprobs == theirs.prompt_logprobs
    assert llm.core.stats().graph_replays_total > 0
