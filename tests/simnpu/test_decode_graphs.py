"""Decodes as one NPU graph each: lengths that live on the host are updated before each replay, and
the CPU's tokens come out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_here import CompiledHere
from simnpu_device import graphs
from tiny_models import make_tiny_model

from piecework.kernels.npu.attention import AscendAttention, AscendDecodePlan
from piecework.kernels.npu.graph import UpdatedGraph
from piecework.kernels.npu.platform import NpuPlatform
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.engine import graph_startup
from piecework.runtime.graphs.dummy_batch import dummy_decode
from piecework.runtime.llm import LLM, Completion

LAYERS = 2
PROMPTS = [
    [(17 * i + 3 * j) % 400 for j in range(length)]
    for i, length in enumerate([3, 120, 9, 250, 14, 127])
]
PARAMS = [
    SamplingParams(temperature=0.0, max_new_tokens=5 + 2 * i, ignore_eos=True, logprobs=5)
    for i in range(len(PROMPTS))
]
"""The sequences end one after another, so that batches of 6, 5, ... 1 decodes come; some of them go
on to another page.
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", str(tmp_path / "cache"))
    # Hardware's kernel takes 16 bits alone; the simulated one takes 32, in which answers are
    # compared tightly.
    monkeypatch.setattr(AscendAttention, "dtypes", (torch.float32,))
    monkeypatch.setattr(AscendAttention, "head_sizes", (16, 32))


def engine(path: Path, device: str, **settings: Any) -> LLM:
    return LLM(
        str(path),
        dtype="float32",
        device=device,
        max_total_tokens=4096,
        context_length=384,
        num_threads=1,
        **settings,
    )


def recorded(path: Path, **settings: Any) -> LLM:
    return engine(
        path, "npu", **{"cuda_graph_backend_decode": "full", "cuda_graph_bs": "1,2,4", **settings}
    )


def assert_same(ours: list[Completion], eager: list[Completion]) -> None:
    for one, other in zip(ours, eager, strict=True):
        assert one.token_ids == other.token_ids
        assert [entry.logprob for entry in one.logprobs] == pytest.approx(
            [entry.logprob for entry in other.logprobs], abs=1e-4
        )


def fused_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_fused(*_: Any) -> None:
        raise AssertionError("plain torch ran where the fused kernel reaches")

    monkeypatch.setattr(AscendAttention, "_plain_plan", not_fused)


@pytest.mark.parametrize(
    "architecture",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "mistral", "qwen2")),
        "qwen3",
    ],
)
def test_every_batch_size_equals_the_cpu(
    tmp_path: Path, simnpu: Any, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    fused_only(monkeypatch)
    path = make_tiny_model(tmp_path / "model", architecture, num_hidden_layers=LAYERS)
    llm = recorded(path)
    info = llm.info.graphs
    assert (info.decode_backend, info.decode_sizes, info.failed_sizes, info.num_graphs) == (
        "full",
        [1, 2, 4],
        {},
        3,
    )
    with simnpu.strict_addresses():
        assert_same(llm.generate(PROMPTS, PARAMS), engine(path, "cpu").generate(PROMPTS, PARAMS))
    stats = llm.core.stats()
    assert (
        stats.graph_replays_total >= 6
        and stats.padded_tokens_total > 0
        and stats.graph_fallbacks_total.keys() == {"too_long"}
    )


@pytest.mark.parametrize("pieces", ["piecewise", "breakable"])
def test_beside_graphs_of_prefills(
    tmp_path: Path, simnpu: Any, monkeypatch: pytest.MonkeyPatch, pieces: str
) -> None:
    fused_only(monkeypatch)
    monkeypatch.setattr(graph_startup, "start", CompiledHere)
    path = make_tiny_model(tmp_path / "model", num_hidden_layers=LAYERS)
    llm = recorded(path, cuda_graph_backend_prefill=pieces, piecewise_cuda_graph_tokens="16,128")
    info = llm.info.graphs
    assert (info.prefill_sizes, info.decode_sizes, info.failed_sizes) == ([16, 128], [1, 2, 4], {})
    assert info.num_graphs == 2 * (LAYERS + 1) + 3
    with simnpu.strict_addresses():
        assert_same(llm.generate(PROMPTS, PARAMS), engine(path, "cpu").generate(PROMPTS, PARAMS))


@pytest.mark.parametrize(
    "settings", [{"page_size": 16}, {"architecture": "mistral", "sliding_window": 24}], ids=str
)
def test_where_the_fused_kernel_does_not_reach(
    tmp_path: Path, simnpu: Any, settings: dict[str, Any]
) -> None:
    page_size, config = (
        settings.get("page_size"),
        {name: value for name, value in settings.items() if name != "page_size"},
    )
    path = make_tiny_model(tmp_path / "model", num_hidden_layers=LAYERS, **config)
    llm = recorded(path, page_size=page_size)
    assert (llm.info.graphs.decode_sizes, llm.info.graphs.failed_sizes) == ([1, 2, 4], {})
    assert_same(llm.generate(PROMPTS, PARAMS), engine(path, "cpu").generate(PROMPTS, PARAMS))


def test_decodes_are_recorded_without_a_word(tmp_path: Path, simnpu: Any) -> None:
    info = engine(
        make_tiny_model(tmp_path / "model", num_hidden_layers=LAYERS), "npu", max_running_requests=4
    ).info.graphs
    assert (info.decode_backend, info.decode_sizes) == ("full", [1, 2, 4])


def test_a_replay_is_launched_before_its_lengths_are_updated(
    tmp_path: Path, simnpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_tiny_model(tmp_path / "model", num_hidden_layers=LAYERS)
    llm, calls = recorded(path), []
    replay, update = torch.npu.NPUGraph.replay, torch.npu.NPUGraph.update
    monkeypatch.setattr(
        torch.npu.NPUGraph, "replay", lambda graph: calls.append("replay") or replay(graph)
    )
    monkeypatch.setattr(
        torch.npu.NPUGraph,
        "update",
        lambda graph, cpu_update_input: calls.append("update") or update(graph, cpu_update_input),
    )
    with simnpu.strict_addresses():
        assert_same(llm.generate(PROMPTS, PARAMS), engine(path, "cpu").generate(PROMPTS, PARAMS))
    assert len(calls) >= 12 and calls == ["replay", "update"] * (len(calls) // 2)


def test_a_replay_waits_for_nothing(tmp_path: Path, simnpu: Any) -> None:
    llm = recorded(make_tiny_model(tmp_path / "model", num_hidden_layers=LAYERS))
    decode = llm.core._runner.graphs.base.decode  # type: ignore[attr-defined]
    platform = NpuPlatform()
    step = dummy_decode(3, 5, platform, 128)
    decode._backend.update_plan(decode._plan, step.metadata, 4)
    with simnpu.no_waiting(), torch.no_grad():
        for size in (4, 4, 2, 1, 4):
            assert (
                decode.graphs.replay(size, [step.input_ids[:size], step.positions[:size]])
                is not None
            )


class TestSeeded:
    """Mistakes that hardware would punish, seeded in our own code."""

    def test_replay_without_update(
        self,
        tmp_path: Path,
        simnpu: Any,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setattr(UpdatedGraph, "replay", lambda graph: graph._graph.replay())
        path = make_tiny_model(tmp_path / "model", num_hidden_layers=LAYERS)
        with simnpu.limits(hang_seconds=0.05):
            llm = recorded(path)
        assert llm.info.graphs.failed_sizes == dict.fromkeys(["1", "2", "4"], "capture_failed")
        assert "hardware would hang" in caplog.text
        assert_same(llm.generate(PROMPTS, PARAMS), engine(path, "cpu").generate(PROMPTS, PARAMS))

    def test_one_update_missing_while_serving(
        self,
        tmp_path: Path,
        simnpu: Any,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        path = make_tiny_model(tmp_path / "model", num_hidden_layers=LAYERS)
        llm = recorded(path)
        monkeypatch.setattr(torch.npu.NPUGraph, "update", lambda graph, cpu_update_input: None)
        with simnpu.limits(hang_seconds=0.05):
            llm.generate(PROMPTS, PARAMS)
        assert "hardware would hang" in caplog.text

    @pytest.mark.parametrize(
        "failing",
        [*(pytest.param(n, marks=pytest.mark.slow) for n in range(LAYERS - 1)), LAYERS - 1],
    )
    def test_an_update_that_fails_ends_its_replay_and_the_step_runs_without(
        self,
        tmp_path: Path,
        simnpu: Any,
        monkeypatch: pytest.MonkeyPatch,
        failing: int,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        path = make_tiny_model(tmp_path / "model", num_hidden_layers=LAYERS)
        llm = recorded(path)
        begin, begun = graphs.graph_task_update_begin, []

        def failing_begin(stream: Any, handle: Any) -> None:
            begun.append(handle)
            if len(begun) == failing + 1:
                raise RuntimeError("no memory for an update")
            begin(stream, handle)

        monkeypatch.setattr(graphs, "graph_task_update_begin", failing_begin)
        assert_same(llm.generate(PROMPTS, PARAMS), engine(path, "cpu").generate(PROMPTS, PARAMS))
        now = llm.core._runner.info().graphs  # type: ignore[attr-defined]
        assert (
            list(now.failed_sizes.values()) == ["replay_failed"]
            and "no memory for an update" in caplog.text
        )

    def test_updated_while_the_last_replay_runs(
        self,
        tmp_path: Path,
        simnpu: Any,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setattr(torch.npu.Stream, "wait_event", lambda stream, event: None)
        path = make_tiny_model(tmp_path / "model", num_hidden_layers=LAYERS)
        llm = recorded(path)
        assert_same(llm.generate(PROMPTS, PARAMS), engine(path, "cpu").generate(PROMPTS, PARAMS))
        assert "a replay of it still runs" in caplog.text

    def test_updates_that_wait_for_the_replay_that_waits_for_them(
        self,
        tmp_path: Path,
        simnpu: Any,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        def crossed(graph: UpdatedGraph) -> None:
            graph._graph.replay()
            graph._graph.graph_dispatch_mode.update_stream.wait_stream(torch.npu.current_stream())
            graph._graph.update(cpu_update_input=[dict(graph._host_arguments())])

        monkeypatch.setattr(UpdatedGraph, "replay", crossed)
        path = make_tiny_model(tmp_path / "model", num_hidden_layers=LAYERS)
        with simnpu.limits(hang_seconds=0.05):
            llm = recorded(path)
        assert llm.info.graphs.failed_sizes == dict.fromkeys(["1", "2", "4"], "capture_failed")
        assert "hardware would hang" in caplog.text

    def test_lengths_of_the_capture_are_remembered(
        self, tmp_path: Path, simnpu: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Attention launched where torch_npu's dispatch mode does not see it: nothing is updated,
        and nothing hangs.
        """
        monkeypatch.setattr(UpdatedGraph, "dispatch_mode", torch.no_grad())
        path = make_tiny_model(tmp_path / "model", num_hidden_layers=LAYERS)
        llm = recorded(path)
        assert llm.info.graphs.failed_sizes == dict.fromkeys(["1", "2", "4"], "wrong_result")
        assert_same(llm.generate(PROMPTS, PARAMS), engine(path, "cpu").generate(PROMPTS, PARAMS))

    def test_a_name_that_the_kernel_was_not_given(
        self, tmp_path: Path, simnpu: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """torch_npu ignores it without a word."""
        monkeypatch.setattr(
            AscendDecodePlan,
            "host_arguments",
            lambda plan, count: {"actual_seq_kvlen": plan.seq_lens[:count]},
        )
        llm = recorded(make_tiny_model(tmp_path / "model", num_hidden_layers=LAYERS))
        assert llm.info.graphs.failed_sizes == dict.fromkeys(["1", "2", "4"], "wrong_result")
