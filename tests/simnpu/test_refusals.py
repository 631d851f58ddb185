"""What an NPU refuses has another way, and the start says which: heads that the fused kernel does
not take, graphs at a level without, kernels that this machine lacks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_tiny_model

from piecework.kernels import reference
from piecework.kernels.attention import KVLayout
from piecework.kernels.npu.attention import AscendAttention
from piecework.kernels.npu.platform import NpuPlatform
from piecework.kernels.npu.refusals import or_else, refused
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.llm import LLM, Completion

PROMPTS = [[(17 * i + 3 * j) % 400 for j in range(length)] for i, length in enumerate([3, 130, 9])]
PARAMS = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True, logprobs=0)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(AscendAttention, "dtypes", (torch.float32,))


def engine(path: Path, device: str, **settings: Any) -> LLM:
    fixed: dict[str, Any] = {
        "dtype": "float32",
        "max_total_tokens": 4096,
        "context_length": 384,
        "num_threads": 1,
    }
    return LLM(str(path), device=device, **fixed, **settings)


def assert_same(ours: list[Completion], expected: list[Completion]) -> None:
    for one, other in zip(ours, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert [entry.logprob for entry in one.logprobs] == pytest.approx(
            [entry.logprob for entry in other.logprobs], abs=1e-4
        )


@pytest.mark.parametrize("decode", ["disabled", "full"])
@pytest.mark.parametrize(("size", "fused"), [(64, True), (80, False), (256, False)])
def test_heads_that_the_fused_kernel_refuses_go_through_plain_torch(
    tmp_path: Path, simnpu: Any, size: int, fused: bool, decode: str
) -> None:
    path = make_tiny_model(tmp_path / "model", "qwen3", num_hidden_layers=2, head_dim=size)
    llm = engine(
        path,
        "npu",
        cuda_graph_backend_decode=decode,
        cuda_graph_bs="4",
        disable_piecewise_cuda_graph=True,
    )
    assert llm.info.graphs.failed_sizes == {}
    assert_same(llm.generate(PROMPTS, PARAMS), engine(path, "cpu").generate(PROMPTS, PARAMS))
    remark = llm.info.remarks.get("attention", "")
    assert ("plain torch" in remark and f"heads of {size} numbers" in remark) != fused


@pytest.mark.parametrize(
    ("heads", "obstacle"),
    [
        ((32, 8, 128), None),
        ((64, 1, 64), None),
        ((65, 1, 64), "65 heads on 1"),
        ((32, 8, 96), "heads of 96 numbers"),
        ((512, 512, 128), "keys of 512 times 128 numbers"),
    ],
)
def test_limits_of_the_op_documentation(heads: tuple[int, int, int], obstacle: str | None) -> None:
    found = AscendAttention.obstacle(KVLayout.of_heads(*heads, torch.float32))
    assert found is None if obstacle is None else found is not None and obstacle in found


def test_where_the_queue_of_launches_forbids_graphs_none_is_tried_and_one_line_says_so(
    tmp_path: Path, simnpu: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "2")
    path = make_tiny_model(tmp_path / "model", num_hidden_layers=2)
    llm = engine(path, "npu")
    graphs = llm.info.graphs
    assert (graphs.prefill_backend, graphs.decode_backend, graphs.failed_sizes) == (
        "disabled",
        "disabled",
        {},
    )
    assert llm.info.remarks["task queue"].startswith(
        "TASK_QUEUE_ENABLE=2 prevents torch_npu from capturing graphs"
    )
    assert "export TASK_QUEUE_ENABLE=1" in llm.info.remarks["task queue"] and not caplog.records
    monkeypatch.delenv("TASK_QUEUE_ENABLE")
    assert_same(llm.generate(PROMPTS, PARAMS), engine(path, "cpu").generate(PROMPTS, PARAMS))


@pytest.mark.parametrize(
    "environment",
    [{}, {"TASK_QUEUE_ENABLE": "0"}, {"TASK_QUEUE_ENABLE": "2", "ASCEND_LAUNCH_BLOCKING": "1"}],
    ids=str,
)
@pytest.mark.parametrize("asks", [True, False])
def test_other_levels_allow_graphs(
    simnpu: Any, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], asks: bool
) -> None:
    """Also where torch_npu cannot be asked and the environment alone tells."""
    if not asks:
        monkeypatch.delattr(torch.npu, "get_task_queue_enable")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert NpuPlatform().graph_obstacle() is None
    monkeypatch.delenv("ASCEND_LAUNCH_BLOCKING", raising=False)
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "2")
    assert NpuPlatform().graph_obstacle() is not None


def test_a_kernel_that_the_machine_lacks_is_left_out_and_one_line_says_so(
    tmp_path: Path, simnpu: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lacking(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        raise RuntimeError("aclnnSwiGlu not in libopapi.so, please upgrade CANN\n[ERROR] 2025")

    monkeypatch.setattr(torch.ops.npu, "npu_swiglu", lacking)
    path = make_tiny_model(tmp_path / "model", num_hidden_layers=2)
    llm = engine(path, "npu", cuda_graph_bs="4")
    assert llm.info.graphs.failed_sizes == {}
    assert_same(llm.generate(PROMPTS, PARAMS), engine(path, "cpu").generate(PROMPTS, PARAMS))
    assert NpuPlatform().remarks()["kernels"] == (
        "plain torch for silu_and_mul, which torch_npu refuses: aclnnSwiGlu not in libopapi.so, "
        "please upgrade CANN"
    )
    assert sum("silu_and_mul" in record.message for record in caplog.records) == 1
    refused.clear()


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("NPU has none"), RuntimeError("NPU out of memory. Tried to allocate")],
)
def test_a_kernel_without_memory_is_not_left_out(simnpu: Any, error: RuntimeError) -> None:
    def scarce(x: torch.Tensor) -> torch.Tensor | None:
        raise error

    with pytest.raises(RuntimeError, match=str(error)):
        or_else(reference.silu_and_mul)(scarce)(torch.zeros(1, 2))
    assert not refused


def test_a_capture_is_not_gone_on_with_behind_a_refusal(
    simnpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is recorded by then is lost."""
    monkeypatch.setattr(torch.npu, "is_current_stream_capturing", lambda: True)

    def refuse(x: torch.Tensor) -> torch.Tensor | None:
        raise RuntimeError("refused")

    with pytest.raises(RuntimeError, match="refused"):
        or_else(reference.silu_and_mul)(refuse)(torch.zeros(1, 2))
    assert not refused
