"""The whole engine on the simulated NPU: its scheduler, its cache, its attention and its graphs
give the CPU's answers.
"""

from __future__ import annotations

import gc
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_here import CompiledHere
from tiny_models import make_tiny_model

from piecework.kernels.graph import DeviceGraph
from piecework.kernels.npu.attention import AscendAttention
from piecework.kernels.npu.platform import NpuPlatform
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.engine import graph_startup
from piecework.runtime.llm import LLM, Completion

SIZES = [4, 16, 33]
AROUND = [size + offset for size in SIZES for offset in (-1, 0, 1)]
LENGTHS = [*AROUND, 140, 260]
PROMPTS = [[(17 * i + 3 * j) % 400 for j in range(length)] for i, length in enumerate(LENGTHS)]
PARAMS = SamplingParams(
    temperature=0.0, max_new_tokens=5, ignore_eos=True, logprobs=5, prompt_logprobs=0
)
LAYERS = 2


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An architecture's pieces are compiled once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def here(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", str(cache))
    monkeypatch.setattr(graph_startup, "start", CompiledHere)
    # Hardware's kernel takes 16 bits alone; the simulated one takes 32, in which answers are
    # compared tightly.
    monkeypatch.setattr(AscendAttention, "dtypes", (torch.float32,))
    monkeypatch.setattr(AscendAttention, "head_sizes", (16, 32))
    monkeypatch.setattr(NpuPlatform, "padding_limit", 8.0)


def engine(path: Path, device: str, **settings: Any) -> LLM:
    """Decodes run eagerly here: test_decode_graphs.py has them recorded."""
    fixed: dict[str, Any] = {
        "dtype": "float32",
        "max_total_tokens": 4096,
        "num_threads": 1,
        "cuda_graph_backend_decode": "disabled",
    }
    return LLM(str(path), device=device, **fixed, **settings)


def with_graphs(path: Path, backend: str) -> LLM:
    return engine(
        path,
        "npu",
        cuda_graph_backend_prefill=backend,
        piecewise_cuda_graph_tokens=",".join(map(str, SIZES)),
    )


def assert_same(ours: list[Completion], eager: list[Completion]) -> None:
    for one, other in zip(ours, eager, strict=True):
        assert one.token_ids == other.token_ids
        said, wanted = (
            [e.logprob for e in [*(c.prompt_logprobs or []), *c.logprobs] if e is not None]
            for c in (one, other)
        )
        assert said == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize(
    ("backend", "architecture"),
    [
        # Norms of heads, a window and each backend in the default run.
        *(("piecewise", "qwen3"), ("breakable", "mistral")),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                *(("piecewise", "llama"), ("breakable", "qwen2")),
                *(("piecewise", "mistral"), ("piecewise", "qwen2")),
                *(("breakable", "llama"), ("breakable", "qwen3")),
            )
        ),
    ],
)
def test_every_size_and_its_neighbours_equal_the_cpu(
    tmp_path: Path, simnpu: Any, monkeypatch: pytest.MonkeyPatch, backend: str, architecture: str
) -> None:
    def not_fused(*_: Any) -> None:
        raise AssertionError("plain torch ran where the fused kernel reaches")

    monkeypatch.setattr(AscendAttention, "_plain_plan", not_fused)
    path = make_tiny_model(tmp_path / "model", architecture, num_hidden_layers=LAYERS)
    llm = with_graphs(path, backend)
    info = llm.info.graphs
    assert (info.prefill_sizes, info.failed_sizes, info.num_graphs) == (
        SIZES,
        {},
        (LAYERS + 1) * len(SIZES),
    )
    expected = engine(path, "cpu").generate(PROMPTS, PARAMS)
    with simnpu.strict_addresses():
        assert_same([llm.generate([prompt], PARAMS)[0] for prompt in PROMPTS], expected)
        # A crowd: mixed steps, and prompts whose beginnings are in the prefix tree by now.
        assert_same(llm.generate(PROMPTS, PARAMS), expected)
    stats = llm.core.stats()
    assert stats.graph_replays_total > len(AROUND) and stats.padded_tokens_total > 0


def test_eager_steps_equal_the_cpu(tmp_path: Path, simnpu: Any) -> None:
    path = make_tiny_model(tmp_path / "model", "qwen2", num_hidden_layers=LAYERS)
    assert_same(
        engine(path, "npu").generate(PROMPTS, PARAMS), engine(path, "cpu").generate(PROMPTS, PARAMS)
    )


@pytest.mark.parametrize(
    "settings",
    [{"page_size": 16}, {"chunked_prefill_size": 37}, {"disable_radix_cache": True}],
    ids=str,
)
def test_other_pages_and_chunks_equal_the_cpu(
    tmp_path: Path, simnpu: Any, settings: dict[str, Any]
) -> None:
    """Pages that the fused kernel does not take are left to plain torch."""
    path = make_tiny_model(tmp_path / "model", num_hidden_layers=LAYERS)
    assert_same(
        engine(path, "npu", **settings).generate(PROMPTS, PARAMS),
        engine(path, "cpu").generate(PROMPTS, PARAMS),
    )


def test_a_sliding_window_equals_the_cpu(tmp_path: Path, simnpu: Any) -> None:
    path = make_tiny_model(
        tmp_path / "model", "mistral", num_hidden_layers=LAYERS, sliding_window=24
    )
    assert_same(
        engine(path, "npu").generate(PROMPTS, PARAMS), engine(path, "cpu").generate(PROMPTS, PARAMS)
    )


@pytest.mark.parametrize(
    ("backend", "decodes"),
    [
        *(("piecewise", False), ("breakable", True)),
        pytest.param("piecewise", True, marks=pytest.mark.slow),
        pytest.param("breakable", False, marks=pytest.mark.slow),
    ],
)
def test_debug_finds_a_weight_that_moved(
    tmp_path: Path, simnpu: Any, backend: str, decodes: bool
) -> None:
    path = make_tiny_model(tmp_path / "model", num_hidden_layers=LAYERS)
    fixed: dict[str, Any] = {
        "dtype": "float32",
        "max_total_tokens": 4096,
        "debug_cuda_graph": True,
        "cuda_graph_backend_prefill": backend,
    }
    llm = LLM(
        str(path),
        device="npu",
        piecewise_cuda_graph_tokens="16",
        cuda_graph_bs="1",
        context_length=384,
        **fixed,
    )
    assert (llm.info.graphs.prefill_sizes, llm.info.graphs.decode_sizes) == ([16], [1])
    params = SamplingParams(temperature=0.0, max_new_tokens=3 if decodes else 1, ignore_eos=True)
    llm.generate([PROMPTS[3]], params)
    runner: Any = llm.core._runner
    weight = next(iter(runner.model.parameters()))
    weight.data = weight.data.clone()
    llm.generate([PROMPTS[4]], params)
    moved = runner.info().graphs.failed_sizes
    assert moved == {"16": "input_moved", **({"1": "input_moved"} if decodes else {})}


@pytest.mark.parametrize(
    ("number", "backend"),
    [
        # Each size and each backend in the default run.
        pytest.param(number, backend, marks=[pytest.mark.slow] * ((number + first) % 2))
        for number in range(len(SIZES))
        for first, backend in enumerate(("piecewise", "breakable"))
    ],
)
def test_after_an_invalidated_capture_all_others_succeed(
    tmp_path: Path, emptied_simnpu: Any, monkeypatch: pytest.MonkeyPatch, backend: str, number: int
) -> None:
    """An op that makes the host wait ends one capture, at its second graph; its memory comes back,
    and other sizes are captured.
    """
    path = make_tiny_model(tmp_path / "model", num_hidden_layers=LAYERS)
    before, end, seen = torch.npu.memory_reserved(), DeviceGraph.end, []

    def waits(graph: DeviceGraph) -> None:
        seen.append(graph)
        if len(seen) == number * (LAYERS + 1) + 2:
            with suppress(RuntimeError):
                torch.ones(1, device="npu").item()
        end(graph)

    monkeypatch.setattr(DeviceGraph, "end", waits)
    llm = with_graphs(path, backend)
    failed = sorted(SIZES, reverse=True)[number]
    assert llm.info.graphs.failed_sizes == {str(failed): "capture_failed"}
    assert llm.info.graphs.prefill_sizes == [size for size in SIZES if size != failed]
    assert_same(llm.generate(PROMPTS, PARAMS), engine(path, "cpu").generate(PROMPTS, PARAMS))
    seen.clear()
    del llm
    gc.unfreeze()
    gc.collect()
    torch.npu.empty_cache()
    assert torch.npu.memory_reserved() <= before


def test_without_graphs_to_spare_sizes_run_eagerly(tmp_path: Path, simnpu: Any) -> None:
    path = make_tiny_model(tmp_path / "model", num_hidden_layers=LAYERS)
    with simnpu.limits(graph_limit=simnpu.live_graphs + LAYERS + 2):
        llm = with_graphs(path, "piecewise")
    assert llm.info.graphs.prefill_sizes == [33]
    assert_same(llm.generate(PROMPTS, PARAMS), engine(path, "cpu").generate(PROMPTS, PARAMS))
