"""A whole model whose norms and activations are a library's gives the same tokens with pieces and
recorded decodes as without graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import compiled_here
import flashinfer_standin
import library_ops_standin
import pytest
import torch
from compiled_here import CompiledHere
from flashinfer_standin import store
from tiny_models import make_tiny_model
from tried_here import TriedHere

pytest.importorskip("triton", reason="Triton is not installed")

from piecework.kernels import ops, reference
from piecework.kernels.attention import AttentionBackend
from piecework.kernels.cpu.platform import CpuPlatform
from piecework.kernels.cuda import attention
from piecework.kernels.cuda import libraries as cuda_libraries
from piecework.kernels.cuda import ops as cuda_ops
from piecework.kernels.cuda.attention import FlashInferAttention
from piecework.kernels.cuda.libraries import LibraryOps
from piecework.kernels.cuda.ops import Libraries
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.engine import graph_startup
from piecework.runtime.executor import model_runner
from piecework.runtime.executor.model_runner import ModelRunner
from piecework.runtime.graphs.dummy_batch import dummy_prefill
from piecework.runtime.llm import LLM

PROMPTS = [[5, 6, 7], list(range(20, 90)), [9], list(range(20, 50))]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=6, ignore_eos=True)
IMPLEMENTATIONS = {
    "rms_norm": cuda_ops.rms_norm,
    "silu_and_mul": cuda_ops.silu_and_mul,
    # Triton's, but for its interpreter's time.
    "add_rms_norm": reference.add_rms_norm,
    "rotary_embedding": reference.rotary_embedding,
    "norm_rotary_embedding": reference.norm_rotary_embedding,
}


class LibrariesOnCpu(CpuPlatform):
    attention_backends = ("flashinfer", "torch")
    padding_limit = 4.0

    def make_attention_backend(self, name: str) -> AttentionBackend:
        return (
            super().make_attention_backend(name) if name == "torch" else FlashInferAttention(store)
        )


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[LibraryOps]]:
    """Both, over their stand-ins; the call that neither takes would be a failure."""
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", str(tmp_path))
    for module in (model_runner, compiled_here):
        monkeypatch.setattr(module, "detect", lambda device: LibrariesOnCpu())
    monkeypatch.setattr(graph_startup, "start", CompiledHere)
    monkeypatch.setattr(attention, "_library", lambda: flashinfer_standin)
    monkeypatch.setattr(attention, "_WORKSPACE_BYTES", 1024)
    found = [library_ops_standin.sgl_kernel(), library_ops_standin.flashinfer()]
    monkeypatch.setattr(
        cuda_libraries, "load", {library.name: library for library in found}.__getitem__
    )
    monkeypatch.setattr(cuda_ops, "_libraries", Libraries(found, TriedHere()))
    for name in ("rms_norm", "silu_and_mul"):
        monkeypatch.setattr(
            cuda_ops.triton_ops,
            name,
            lambda *given, n=name: pytest.fail(f"no library has taken {n}"),
        )
    for name in ("add_rms_norm", "rotary_embedding", "norm_rotary_embedding"):
        monkeypatch.setattr(cuda_ops, name, lambda *given, n=name: getattr(reference, n)(*given))
    library = torch.library.Library("piecework", "FRAGMENT")
    for name, implementation in IMPLEMENTATIONS.items():
        library.impl(name, implementation, "CPU")
    ops.register("cpu", cuda_ops)
    yield found
    ops._versions.pop("cpu")
    library._destroy()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With norms of queries and keys."""
    return make_tiny_model(
        tmp_path_factory.mktemp("models") / "qwen3", "qwen3", num_hidden_layers=2
    )


def make(model: Path, **settings: Any) -> LLM:
    defaults = {
        "device": "cpu",
        "dtype": "bfloat16",
        "max_total_tokens": 1024,
        "context_length": 128,
        "chunked_prefill_size": 48,
        "num_threads": 1,
    }
    return LLM(str(model), **defaults | settings)


def generated(llm: LLM) -> list[list[int]]:
    """Prompts longer than a step, beside decodes; the second time over a prefix."""
    return [completion.token_ids for _ in range(2) for completion in llm.generate(PROMPTS, GREEDY)]


def test_tokens_with_graphs_are_those_without(model: Path, libraries: list[LibraryOps]) -> None:
    expected = generated(make(model, disable_cuda_graph=True))
    sgl, flashinfer = (library.module.calls for library in libraries)
    # The first norm of the model and every activation; norms of heads.
    assert set(sgl) == {"rmsnorm", "silu_and_mul"} and set(flashinfer) == {"rmsnorm"}

    decodes = make(model, cuda_graph_backend_decode="full", cuda_graph_bs="1,2,4")
    assert generated(decodes) == expected
    assert (
        decodes.info.graphs.decode_sizes == [1, 2, 4]
        and decodes.core.stats().graph_replays_total > 5
    )

    pieces = {
        "piecewise_cuda_graph": True,
        "piecewise_cuda_graph_compiler": "eager",
        "piecewise_cuda_graph_tokens": "16,48",
    }
    prefills = make(model, startup="full", **pieces)
    before = len(sgl)
    assert generated(prefills) == expected
    assert prefills.info.graphs.prefill_sizes == [16, 48] and len(sgl) > before


def test_hidden_states_are_those_of_the_definition_but_for_rounding(
    model: Path, libraries: list[LibraryOps]
) -> None:
    runner = make(model, attention_backend="torch", disable_cuda_graph=True).core._runner
    assert isinstance(runner, ModelRunner)
    step = dummy_prefill(33, 1, runner.platform, 16)

    def hidden() -> torch.Tensor:
        with torch.no_grad(), runner.graphs.base._attention.step(step.metadata):
            result: torch.Tensor = runner.model(step.input_ids, step.positions)
        return result.double()

    own = hidden()
    with ops.plain_torch():
        plain = hidden()
    assert not torch.equal(own, plain)
    assert float((own - plain).norm() / plain.norm()) < 0.02
