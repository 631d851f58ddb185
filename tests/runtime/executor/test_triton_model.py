"""A whole model on Triton's attention and ops gives the tokens of plain torch: eagerly, in pieces,
and with recorded decodes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sparse import sparse
from tiny_models import make_tiny_model
from triton_interpreter import DEVICE

from piecework.compilation.piece_maker import PieceMaker
from piecework.kernels import ops
from piecework.kernels.attention import AttentionBackend
from piecework.kernels.cpu.platform import CpuPlatform
from piecework.kernels.cuda import ops as cuda_ops
from piecework.kernels.staging import HostCopy
from piecework.kernels.triton import ops as triton_ops
from piecework.kernels.triton.attention import Blocks, TritonAttention
from piecework.runtime.config.model import ModelConfig
from piecework.runtime.core.generation import GenerateRequest
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.executor import model_runner
from piecework.runtime.executor.model_runner import ModelRunner
from piecework.runtime.graphs.compile_pieces import make_pieces
from piecework.runtime.graphs.dummy_batch import dummy_prefill
from piecework.runtime.graphs.pieces import piece_store
from piecework.runtime.llm import LLM

PROMPTS = [[5, 6, 7], list(range(20, 60)), [9]]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=3, ignore_eos=True)
OPS = {"rms_norm", "add_rms_norm", "silu_and_mul", "norm_rotary_embedding"}
_FUSED = {f"{op}_quantize_dynamic" for op in ("rms_norm", "add_rms_norm", "silu_and_mul")}
QUANTIZED = {
    "int8": _FUSED | {"quantize_dynamic", "scaled_linear"},
    "fp8": _FUSED | {"quantize_dynamic", "scaled_linear"},
}


class TritonOnCpu(CpuPlatform):
    """Triton's kernels on the host's memory, through its interpreter."""

    attention_backends = ("triton",)
    padding_limit = 2.0

    def make_attention_backend(self, name: str) -> AttentionBackend:
        return TritonAttention(blocks=Blocks(32, 16), num_splits=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(
        tmp_path_factory.mktemp("models") / "qwen3", "qwen3", num_hidden_layers=2
    )


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    return tokens(model)


@pytest.fixture
def on_triton(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(model_runner, "detect", lambda device: TritonOnCpu())
    library = torch.library.Library("piecework", "FRAGMENT")
    for name in ops.TRACED.keys() & vars(triton_ops).keys():
        library.impl(name, getattr(triton_ops, name), "CPU")
    ops.register("cpu", cuda_ops)
    yield
    ops._versions.pop("cpu")
    library._destroy()


def make(model: Path, **settings: Any) -> LLM:
    defaults = {
        "device": "cpu",
        "dtype": "float32",
        "max_total_tokens": 512,
        "context_length": 128,
        "chunked_prefill_size": 48,
        "num_threads": 1,
    }
    return LLM(str(model), **defaults | settings)


def of(runner: ModelRunner) -> tuple[torch.nn.Module, ModelConfig, torch.dtype]:
    return runner.model, runner.model_config, runner.dtype


def tokens(model: Path, **settings: Any) -> list[list[int]]:
    return generated(make(model, **settings))


def generated(llm: LLM) -> list[list[int]]:
    # The second time, the prompts' pages are in the cache: a prefill over a prefix.
    return [completion.token_ids for _ in range(2) for completion in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda", reason="Triton compiles for the GPU here")
def test_tokens_are_those_of_plain_torch(
    model: Path, expected: list[list[int]], on_triton: None
) -> None:
    assert tokens(model) == expected


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda", reason="Triton compiles for the GPU here")
def test_so_are_those_of_recorded_decodes(
    model: Path, expected: list[list[int]], on_triton: None
) -> None:
    llm = make(model, cuda_graph_backend_decode="full", cuda_graph_bs="4")
    assert generated(llm) == expected
    assert llm.core.stats().graph_replays_total > 0


@pytest.mark.skipif(DEVICE == "cuda", reason="Triton compiles for the GPU here")
@pytest.mark.parametrize(
    ("quantization", "found"),
    sparse([("auto", OPS), *QUANTIZED.items()], kept=[("auto", OPS), ("int8", QUANTIZED["int8"])]),
)
def test_a_model_is_traced_with_its_ops_whole(
    quantization: str, found: set[str], model: Path, on_triton: None
) -> None:
    """What is quantised is fused with what is before it, and gives what plain torch gives."""
    runner = make(model, quantization=quantization).core._runner
    assert isinstance(runner, ModelRunner)
    pieces, _ = make_pieces(
        piece_store(
            PieceMaker,
            replace(runner.config, piecewise_cuda_graph_compiler="eager"),
            runner.platform,
        ),
        *of(runner),
    )
    traced = {op.removesuffix(".default") for piece in pieces.plan.pieces for op in piece.ops}
    assert {f"piecework.{name}" for name in found} <= traced, traced
    step = dummy_prefill(9, 1, runner.platform, 16)
    with torch.no_grad(), runner.graphs.base._attention.step(step.metadata):
        own = pieces(step.input_ids, step.positions)
        with ops.plain_torch():
            plain = runner.model(step.input_ids, step.positions)
    # A number of 8 bits may be rounded the other way.
    allowed = 1e-5 if quantization == "auto" else 0.02
    assert float((own - plain).norm() / plain.norm()) < allowed


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no NVIDIA GPU")
@pytest.mark.parametrize("architecture", ["qwen3", "mistral"])
@pytest.mark.parametrize(
    "settings",
    [
        {"disable_cuda_graph": True},
        {"piecewise_cuda_graph": True},
        {"cuda_graph_backend_prefill": "breakable"},
        {"attention_backend": "torch", "disable_cuda_graph": True},
    ],
    ids=["no graphs", "piecewise", "breakable", "torch's attention"],
)
def test_tokens_on_the_gpu_are_those_of_the_cpu(
    architecture: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """In float32; the window of the Mistral is shorter than its longest prompt."""
    overrides = {"sliding_window": 16} if architecture == "mistral" else {}
    folder = make_tiny_model(tmp_path / architecture, architecture, **overrides)
    cpu = tokens(folder)
    assert tokens(folder, device="cuda", startup="full", **settings) == cpu


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no NVIDIA GPU")
@pytest.mark.parametrize(
    "settings",
    [{"disable_cuda_graph": True}, {"piecewise_cuda_graph": True}],
    ids=["no graphs", "graphs"],
)
def test_a_step_waits_for_the_device_once(
    settings: dict[str, Any], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To read its tokens, behind an event; torch warns of every other way to wait when it is asked
    to, and of events never.
    """
    llm = make(model, device="cuda", startup="full", **settings)
    generated(llm)
    sampled = [
        SamplingParams(max_new_tokens=3, ignore_eos=True, seed=1, top_p=top_p)
        for top_p in (1.0, 0.9)
    ]
    for number, params in enumerate([GREEDY, *sampled]):
        llm.core.add(GenerateRequest(rid=str(number), input_ids=PROMPTS[1], params=params))
    steps, read = 0, []
    wait = HostCopy.wait
    monkeypatch.setattr(HostCopy, "wait", lambda copy: read.append(copy) or wait(copy))
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            while llm.core.has_work:
                llm.core.step()
                steps += 1
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [
        str(warning.message) for warning in caught if "synchroniz" in str(warning.message)
    ] == []
    assert 0 < len(read) <= steps
