"""Full graphs of decodes: the same tokens and log-probabilities as eager at captured batch sizes,
padded ones and all others.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from compiled_here import CompiledHere
from sparse import sparse
from tiny_models import make_tiny_model

from piecework.compilation.capture import Graphs
from piecework.compilation.core.errors import CaptureError
from piecework.kernels.cpu.platform import CpuPlatform
from piecework.kernels.paged_attention import TorchAttention
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.engine import graph_startup
from piecework.runtime.llm import LLM, Completion

PROMPTS = [[(17 * i + 3 * j) % 400 for j in range(3 + 5 * i)] for i in range(6)]
PARAMS = [
    SamplingParams(temperature=0.0, max_new_tokens=5 + 2 * i, ignore_eos=True, logprobs=5)
    for i in range(6)
]
"""The sequences end one after another, so that batches of 6, 5, ... 1 decodes come."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An architecture's pieces are compiled once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def here(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", str(cache))
    monkeypatch.setattr(graph_startup, "start", CompiledHere)


def engine(path: Path, **settings: Any) -> LLM:
    return LLM(
        str(path),
        dtype="float32",
        max_total_tokens=1024,
        context_length=128,
        num_threads=1,
        **settings,
    )


def recorded(path: Path, **settings: Any) -> LLM:
    return engine(
        path, **{"cuda_graph_backend_decode": "full", "cuda_graph_bs": "1,2,4", **settings}
    )


def assert_same(ours: list[Completion], eager: list[Completion]) -> None:
    for one, other in zip(ours, eager, strict=True):
        assert one.token_ids == other.token_ids
        assert [entry.logprob for entry in one.logprobs] == pytest.approx(
            [entry.logprob for entry in other.logprobs], abs=1e-4
        )


@pytest.mark.parametrize(
    ("architecture", "in_pieces", "padding"),
    sparse(
        product(("llama", "mistral", "qwen2", "qwen3"), (False, True), (1.0, 2.0)),
        kept=[("llama", False, 1.0), ("qwen3", True, 2.0)],
    ),
)
def test_decode_graphs_give_what_eager_gives(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    in_pieces: bool,
    padding: float,
) -> None:
    monkeypatch.setattr(CpuPlatform, "padding_limit", padding)
    path = make_tiny_model(tmp_path / "model", architecture)
    settings = (
        {"piecewise_cuda_graph": True, "piecewise_cuda_graph_compiler": "eager"}
        if in_pieces
        else {}
    )
    llm = recorded(path, **settings)
    assert llm.info.graphs.decode_sizes == [1, 2, 4]
    assert_same(llm.generate(PROMPTS, PARAMS), engine(path).generate(PROMPTS, PARAMS))
    stats = llm.core.stats()
    assert stats.graph_replays_total >= (3 if padding == 1.0 else 6)
    assert (stats.padded_tokens_total > 0) == (padding > 1.0)


def test_a_batch_over_the_largest_size_runs_without_a_graph_and_is_counted(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "model")
    llm = recorded(path, cuda_graph_bs=None, cuda_graph_max_bs=2)
    assert llm.info.graphs.decode_sizes == [1, 2]
    assert_same(llm.generate(PROMPTS, PARAMS), engine(path).generate(PROMPTS, PARAMS))
    assert llm.core.stats().graph_fallbacks_total["too_long"] > 0


def test_a_batch_size_whose_capture_fails_runs_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    record = Graphs._record

    def fails_at_2(graphs: Graphs, size: int, *rest: Any) -> Any:
        if size == 2:
            raise CaptureError("seeded")
        return record(graphs, size, *rest)

    monkeypatch.setattr(Graphs, "_record", fails_at_2)
    path = make_tiny_model(tmp_path / "model")
    llm = recorded(path)
    assert (llm.info.graphs.decode_sizes, llm.info.graphs.failed_sizes) == (
        [1, 4],
        {"2": "capture_failed"},
    )
    assert "2 requests run without a graph" in caplog.text
    assert_same(llm.generate(PROMPTS, PARAMS), engine(path).generate(PROMPTS, PARAMS))


def test_a_plan_that_forgets_the_lengths_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seeded: the plan that is updated in place forgets the lengths of the step."""
    update = TorchAttention.update_plan

    def forgets(self: TorchAttention, plan: Any, metadata: Any, batch_size: int) -> None:
        update(self, plan, metadata, batch_size)
        plan.seq_lens.fill_(1)

    monkeypatch.setattr(TorchAttention, "update_plan", forgets)
    path = make_tiny_model(tmp_path / "model")
    llm = recorded(path, cuda_graph_bs="4")
    assert llm.info.graphs.failed_sizes == {"4": "wrong_result"}


def test_without_a_word_a_cpu_records_no_decodes(tmp_path: Path) -> None:
    info = engine(make_tiny_model(tmp_path / "model")).info
    assert (info.graphs.decode_backend, info.graphs.num_graphs) == ("disabled", 0)


def test_no_graphs_of_any_kind(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "model")
    info = recorded(path, piecewise_cuda_graph=True, disable_cuda_graph=True).info
    assert (info.graphs.prefill_backend, info.graphs.decode_backend, info.graphs.num_graphs) == (
        "disabled",
        "disabled",
        0,
    )


def test_captures_write_to_no_page_that_a_request_may_hold(tmp_path: Path) -> None:
    llm = recorded(make_tiny_model(tmp_path / "model"))
    pool = llm.core._runner.pool  # type: ignore[attr-defined]
    assert not any(part[1:].any() for part in [*pool.k, *pool.v])
