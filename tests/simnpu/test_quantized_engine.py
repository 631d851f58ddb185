"""Quantised checkpoints on the simulated NPU, in 16 bits as hardware has them: its kernels
multiply, graphs hold them, and the answers are those of the CPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_here import CompiledHere
from packed_models import CASES as PACKED
from packed_models import written
from quantized_checkpoints import make_compressed
from sparse import sparse
from tiny_models import make_tiny_model

from piecework.kernels.npu.attention import AscendAttention
from piecework.kernels.npu.platform import NpuPlatform
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.engine import graph_startup
from piecework.runtime.llm import LLM, Completion

PROMPTS = [[(17 * i + 3 * j) % 400 for j in range(length)] for i, length in enumerate([5, 40, 16])]
PARAMS = SamplingParams(temperature=0.0, max_new_tokens=0, prompt_logprobs=0)
SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2}
KERNELS = (
    "npu_add_rms_norm_dynamic_quant",
    "npu_add_rms_norm_quant",
    "npu_dynamic_quant",
    "npu_quant_matmul",
    "npu_quantize",
    "npu_swiglu_quant",
    "npu_weight_quant_batchmatmul",
)


def compressed(kind: str, inputs: dict[str, Any]) -> Callable[[Path], Path]:
    numbers = {"num_bits": 8, "type": kind, "symmetric": True}
    weights = numbers | {"strategy": "channel"}
    return lambda path: make_compressed(
        path, weights, numbers | inputs, form=f"{kind}-quantized", **SIZES
    )


def packed(case: str) -> Callable[[Path], Path]:
    assert case in PACKED
    return lambda path: written(path, case).path


def plain(path: Path) -> Path:
    return make_tiny_model(path / "model", **SIZES, initializer_range=0.05)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(graph_startup, "start", CompiledHere)
    monkeypatch.setattr(AscendAttention, "head_sizes", (16, 32))
    monkeypatch.setattr(NpuPlatform, "padding_limit", 8.0)


@pytest.fixture
def called(simnpu: Any, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each kernel is launched or recorded."""
    counts: Counter[str] = Counter()

    def counted(name: str, op: Any) -> Callable[..., Any]:
        def launch(*args: Any, **named: Any) -> Any:
            counts[name] += 1
            return op(*args, **named)

        return launch

    for name in KERNELS:
        monkeypatch.setattr(torch.ops.npu, name, counted(name, getattr(torch.ops.npu, name)))
    return counts


def engine(path: Path, device: str, **settings: Any) -> LLM:
    fixed: dict[str, Any] = {"dtype": "bfloat16", "max_total_tokens": 4096, "num_threads": 1}
    return LLM(str(path), device=device, **fixed | settings)


def logprobs(answers: list[Completion]) -> torch.Tensor:
    return torch.tensor(
        [e.logprob for answer in answers for e in answer.prompt_logprobs or [] if e is not None]
    )


TOKEN, TENSOR = {"strategy": "token", "dynamic": True}, {"strategy": "tensor", "dynamic": False}
BY_TOKEN = {
    "npu_add_rms_norm_dynamic_quant",
    "npu_dynamic_quant",
    "npu_quant_matmul",
}
BY_TENSOR = {"npu_quant_matmul", "npu_quantize", "npu_swiglu_quant"}
CHECKPOINTS: dict[str, tuple[Callable[[Path], Path], dict[str, Any], set[str]]] = {
    "int8 by token": (compressed("int", TOKEN), {}, BY_TOKEN),
    "int8 with the checkpoint's scales": (compressed("int", TENSOR), {}, BY_TENSOR),
    "int8 in float16": (
        compressed("int", TENSOR),
        {"dtype": "float16"},
        BY_TENSOR | {"npu_add_rms_norm_quant"},
    ),
    "int8 on load": (plain, {"quantization": "int8"}, BY_TOKEN),
    "q4_0 on load": (plain, {"quantization": "q4_0"}, {"npu_weight_quant_batchmatmul"}),
    "gptq in another order": (packed("gptq-act-order"), {}, {"npu_weight_quant_batchmatmul"}),
    "gptq of 8 bits": (packed("gptq-8-rows-head"), {}, {"npu_weight_quant_batchmatmul"}),
    "groups of 16": (packed("pack-8-asymmetric"), {}, set()),
    "fp8": (compressed("float", TOKEN), {}, set()),
}


# The others launch no other kernels.
_USUAL = ("int8 by token", "int8 in float16", "gptq in another order")


@pytest.mark.parametrize("name", sparse(CHECKPOINTS, kept=_USUAL))
def test_graphs_of_quantised_layers_give_the_cpus_answers(
    tmp_path: Path, simnpu: Any, called: Counter[str], name: str
) -> None:
    """Within what 16 bits lose: the CPU computes in 32."""
    make, given, kernels = CHECKPOINTS[name]
    path = make(tmp_path)
    llm = engine(
        path,
        "npu",
        cuda_graph_backend_prefill="piecewise",
        piecewise_cuda_graph_tokens="8,48",
        cuda_graph_bs="4",
        **given,
    )
    graphs = llm.info.graphs
    assert (graphs.failed_sizes, graphs.prefill_sizes, graphs.decode_sizes) == ({}, [8, 48], [4])
    assert called.keys() == kernels
    with simnpu.strict_addresses():
        ours = logprobs(llm.generate(PROMPTS, PARAMS))
    widened = {"quantization": "none"} if name == "fp8" else {}
    wide = engine(path, "cpu", **given | {"dtype": "float32"} | widened)
    differences = (ours - logprobs(wide.generate(PROMPTS, PARAMS))).abs()
    assert differences.mean() < 0.05 and differences.max() < 0.25


def test_eager_steps_take_the_kernels_too(
    tmp_path: Path, simnpu: Any, called: Counter[str]
) -> None:
    """Unfused: no pass has seen them."""
    path = plain(tmp_path)
    settings = {"disable_cuda_graph": True, "disable_piecewise_cuda_graph": True}
    llm = engine(path, "npu", quantization="int8", **settings)
    llm.generate(PROMPTS[:1], PARAMS)
    assert called.keys() == {"npu_dynamic_quant", "npu_quant_matmul"}


def test_fp8_on_load_is_refused_before_memory_is_spent(tmp_path: Path, simnpu: Any) -> None:
    with pytest.raises(ValueError, match="--quantization fp8: "):
        engine(plain(tmp_path), "npu", quantization="fp8")
