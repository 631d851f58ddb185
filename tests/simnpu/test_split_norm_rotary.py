"""Queries, keys and values are split, normalised and rotated by sgl-kernel-npu's kernel where it is
installed: called by its own signature, and left where the device refuses it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_here import CompiledHere
from quantized_models import CONTEXT, LAYERS, ours, traced_model
from sgl_library import install, signature_of
from tiny_models import make_tiny_model

from piecework.compilation.pass_manager import PassManager
from piecework.compilation.passes.config import PassConfig
from piecework.kernels import reference
from piecework.kernels.cpu.platform import CpuPlatform
from piecework.kernels.npu import sgl_kernels
from piecework.kernels.npu.attention import AscendAttention
from piecework.kernels.npu.platform import NpuPlatform
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.engine import graph_startup
from piecework.runtime.llm import LLM

LIBRARY = "norm.split_qkv_rmsnorm_rope", "split_qkv_rmsnorm_rope"
HEADS, KV_HEADS, SIZE, EPS = 4, 2, 16, 1e-6


class Kernel:
    """The kernel in plain torch, as strict as its source."""

    def __init__(self) -> None:
        self.calls = 0
        self.error: Exception | None = None
        self.signature = signature_of(*LIBRARY)

    def __call__(self, *args: Any, **named: Any) -> tuple[torch.Tensor, ...]:
        given = self.signature.bind(*args, **named).arguments
        if self.error is not None:
            raise self.error
        self.calls += 1
        x, size = given["input"], given["head_dim"]
        widths = given["q_hidden_size"], given["kv_hidden_size"], given["kv_hidden_size"]
        assert x.is_contiguous() and x.shape[1] == sum(widths) and widths[0] % widths[1] == 0
        assert size & (size - 1) == 0
        for each in (given["sin"], given["cos"]):
            assert each.is_contiguous() and each.numel() == x.shape[0] * size
        q, k, v = x.split(widths, 1)
        sin, cos = (given[name].view(-1, 1, size) for name in ("sin", "cos"))

        def turned(part: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            heads = reference.rms_norm(part.unflatten(1, (-1, size)), weight, given["eps"])
            first, second = heads.chunk(2, -1)
            return (torch.cat((-second, first), -1) * sin + heads * cos).flatten(1)

        return turned(q, given["q_weight"]), turned(k, given["k_weight"]), v.contiguous()


@pytest.fixture
def kernel(simnpu: Any, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """The library, installed."""
    made = Kernel()
    install(monkeypatch, *LIBRARY, made)
    return made


def arguments(dtype: torch.dtype = torch.bfloat16, heads: int = HEADS) -> list[Any]:
    torch.manual_seed(0)
    angles = torch.rand(5, 1, SIZE // 2)
    cos, sin = angles.cos(), angles.sin()
    tensors = [
        torch.randn(5, (heads + 2 * KV_HEADS) * SIZE),
        *torch.rand(2, SIZE),
        torch.cat((cos, cos), -1),
        torch.cat((-sin, sin), -1),
    ]
    qkv, q_weight, k_weight, cos, sin = (each.to(dtype) for each in tensors)
    return [qkv, q_weight, k_weight, EPS, cos, sin, heads, KV_HEADS]


def expected(given: list[Any]) -> list[torch.Tensor]:
    qkv, *weights, cos, sin, heads, kv_heads = given
    q, k, v = qkv.unflatten(1, (-1, SIZE)).tensor_split([heads, heads + kv_heads], dim=1)
    turned = reference.norm_rotary_embedding(q, k, *weights, cos, sin)
    return [*turned.tensor_split([heads], dim=1), v]


def on_npu(given: list[Any]) -> list[Any]:
    return [each.to("npu") if isinstance(each, torch.Tensor) else each for each in given]


def assert_right(given: list[Any]) -> None:
    found = torch.ops.piecework.split_norm_rotary(*on_npu(given))
    for one, other in zip(found, expected(given), strict=True):
        assert one.is_contiguous() and torch.allclose(one.cpu().float(), other.float(), atol=2e-2)


def test_the_kernel_is_called_as_its_source_says(kernel: Kernel) -> None:
    assert_right(arguments())
    assert kernel.calls == 1


@pytest.mark.parametrize(
    "change", [{"dtype": torch.float16}, {"dtype": torch.float32}, {"heads": 3}]
)
def test_what_it_does_not_support_goes_another_way(kernel: Kernel, change: dict[str, Any]) -> None:
    assert_right(arguments(**change))
    assert kernel.calls == 0


@pytest.mark.parametrize(
    "error", [RuntimeError("MTE out of range"), AssertionError("grid"), ImportError("no triton")]
)
def test_a_refusal_goes_another_way_from_then_on(
    kernel: Kernel, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    kernel.error = error
    for _ in range(2):
        assert_right(arguments())
    (record,) = caplog.records
    assert "plain torch computes split_norm_rotary" in record.getMessage()
    kernel.error = None
    assert_right(arguments())
    assert kernel.calls == 0


def test_the_pass_runs_where_the_library_is_installed(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = PassManager(PassConfig(), NpuPlatform(), fuses=False)
    found = traced_model("qwen3", None)
    matches = manager.run(found.graph, CONTEXT)
    assert matches["norm_rotary"] == matches["split_norm_rotary"] == LAYERS
    found.shapes.check_guards()
    left = ours(found.graph)
    assert left["split_norm_rotary"] == LAYERS and left["norm_rotary_embedding"] == 0
    assert manager.run(traced_model("llama", None).graph, CONTEXT)["split_norm_rotary"] == 0
    monkeypatch.setattr(sgl_kernels, "find_spec", lambda name: None)
    without = PassManager(PassConfig(), NpuPlatform(), fuses=False)
    assert without.off["split_norm_rotary"] == "sgl-kernel-npu is not installed"
    other = PassManager(PassConfig(), CpuPlatform(), fuses=False)
    assert other.off["split_norm_rotary"] == "cpu has no kernel"


def test_what_is_read_elsewhere_too_stays(kernel: Kernel) -> None:
    graph = traced_model("qwen3", None).graph
    turn = next(node for node in graph.nodes if "rotary_embedding" in str(node.target))
    (after,) = turn.users
    (q, *_) = after.users
    with graph.inserting_after(q):
        graph.call_method("abs", (q,))
    matches = PassManager(PassConfig(), NpuPlatform(), fuses=False).run(graph, CONTEXT)
    assert matches["split_norm_rotary"] == LAYERS - 1


@pytest.mark.slow
def test_a_model_says_the_same(
    kernel: Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(graph_startup, "start", CompiledHere)
    monkeypatch.setattr(AscendAttention, "dtypes", (torch.float32, torch.bfloat16))
    path = make_tiny_model(tmp_path / "model", "qwen3", num_hidden_layers=2, head_dim=64)
    params = SamplingParams(temperature=0.0, max_new_tokens=4, ignore_eos=True, logprobs=0)
    prompts = [[(17 * i + 3) % 400 for i in range(length)] for length in (3, 30)]
    answers = []
    for passes in ("auto", "-split_norm_rotary"):
        llm = LLM(
            str(path),
            device="npu",
            dtype="bfloat16",
            max_total_tokens=2048,
            context_length=128,
            num_threads=1,
            piecewise_cuda_graph=True,
            piecewise_cuda_graph_tokens="32",
            cuda_graph_backend_decode="disabled",
            passes=passes,
        )
        assert ("split_norm_rotary" in llm.info.graphs.passes) == (passes == "auto")
        answers.append(llm.generate(prompts, params))
    assert kernel.calls > 0
    for one, other in zip(*answers, strict=True):
        assert [entry.logprob for entry in one.logprobs] == pytest.approx(
            [entry.logprob for entry in other.logprobs], abs=0.1
        )
