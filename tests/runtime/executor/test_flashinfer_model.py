"""A whole model on the flashinfer backend gives the tokens of torch's attention: over a stand-in
here, over flashinfer on a GPU.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import flashinfer_standin
import pytest
import torch
from compiled_here import CompiledHere
from flashinfer_standin import store
from sparse import sparse
from tiny_models import make_tiny_model

from piecework.kernels.attention import AttentionBackend
from piecework.kernels.cpu.platform import CpuPlatform
from piecework.kernels.cuda import attention
from piecework.kernels.cuda.attention import FlashInferAttention
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.engine import graph_startup
from piecework.runtime.executor import model_runner
from piecework.runtime.llm import LLM
from tests.runtime.models.sizes import LATENT

PROMPTS = [[5, 6, 7], list(range(20, 90)), [9], list(range(20, 50))]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=6, ignore_eos=True)


class FlashInferOnCpu(CpuPlatform):
    attention_backends = ("flashinfer",)
    padding_limit = 4.0

    def make_attention_backend(self, name: str) -> AttentionBackend:
        return FlashInferAttention(store)


@pytest.fixture
def on_flashinfer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(model_runner, "detect", lambda device: FlashInferOnCpu())
    monkeypatch.setattr(graph_startup, "start", CompiledHere)
    monkeypatch.setattr(attention, "_library", lambda: flashinfer_standin)
    monkeypatch.setattr(attention, "_WORKSPACE_BYTES", 1024)


MODELS = ["qwen3", "mistral", "deepseek_v3"]


def make(model: Path, **settings: Any) -> LLM:
    defaults = {
        "device": "cpu",
        "dtype": "float32",
        "max_total_tokens": 1024,
        "context_length": 128,
        "chunked_prefill_size": 48,
        "num_threads": 1,
    }
    return LLM(str(model), **defaults | settings)


def generated(llm: LLM) -> list[list[int]]:
    """Prompts longer than a step, beside decodes; the second time over a prefix."""
    return [completion.token_ids for _ in range(2) for completion in llm.generate(PROMPTS, GREEDY)]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The window of the Mistral is shorter than its longest prompt."""
    overrides = {"mistral": {"sliding_window": 16}, "deepseek_v3": LATENT}.get(request.param, {})
    return make_tiny_model(
        tmp_path_factory.mktemp("models") / request.param,
        request.param,
        **{"num_hidden_layers": 2, **overrides},
    )


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    return generated(make(model, attention_backend="torch"))


def test_tokens_are_those_of_torch(
    model: Path, expected: list[list[int]], on_flashinfer: None
) -> None:
    assert generated(make(model)) == expected


def test_so_are_those_of_recorded_decodes(
    model: Path, expected: list[list[int]], on_flashinfer: None
) -> None:
    llm = make(model, cuda_graph_backend_decode="full", cuda_graph_bs="1,2,4")
    assert generated(llm) == expected
    assert llm.info.graphs.decode_sizes == [1, 2, 4] and llm.core.stats().graph_replays_total > 5


@pytest.mark.parametrize("model", sparse(MODELS, kept=["qwen3"]), indirect=True)
def test_so_are_those_of_pieces(
    model: Path, expected: list[list[int]], on_flashinfer: None
) -> None:
    llm = make(
        model,
        piecewise_cuda_graph=True,
        piecewise_cuda_graph_compiler="eager",
        piecewise_cuda_graph_tokens="16,48",
        startup="full",
    )
    assert generated(llm) == expected
    assert llm.info.graphs.prefill_sizes == [16, 48]


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("flashinfer") is None,
    reason="no NVIDIA GPU with flashinfer",
)
@pytest.mark.parametrize(
    "settings",
    [{"disable_cuda_graph": True}, {"piecewise_cuda_graph": True}],
    ids=["no graphs", "graphs"],
)
def test_tokens_on_the_gpu_are_mostly_those_of_torch(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """In bfloat16 near ties fall either way, and one changes what follows: the first token of every
    answer is compared.
    """
    folder = make_tiny_model(
        tmp_path / "model", hidden_size=512, num_attention_heads=8, head_dim=64, num_hidden_layers=2
    )
    common = {"device": "cuda", "dtype": "bfloat16", "startup": "full"}
    on_torch = generated(make(folder, attention_backend="torch", disable_cuda_graph=True, **common))
    on_flashinfer = generated(make(folder, attention_backend="flashinfer", **common, **settings))
    same = sum(one[0] == other[0] for one, other in zip(on_torch, on_flashinfer, strict=True))
    assert same >= len(on_torch) - 1
