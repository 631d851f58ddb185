"""Latent attention on the simulated NPU: decodes by the fused kernel, of whose cache all steps take
the parts where it has them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_tiny_model

from piecework.kernels.attention import KVLayout
from piecework.kernels.npu import latent_attention
from piecework.kernels.npu.attention import AscendAttention
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.llm import LLM
from tests.runtime.models.sizes import GEMMA3N, INDEXED, LATENT

PROMPTS = [list(range(5, 145)), [7, 8, 9], list(range(5, 137)), list(range(30, 40))]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=6, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models"), "deepseek_v3", **LATENT)


@pytest.fixture(autouse=True)
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", str(tmp_path / "cache"))
    # Hardware takes 16 bits, 512 + 64 numbers and 32 heads or more.
    monkeypatch.setattr(AscendAttention, "dtypes", (torch.float32,))
    monkeypatch.setattr(AscendAttention, "head_sizes", (64,))
    sizes = LATENT["kv_lora_rank"], LATENT["qk_rope_head_dim"]
    monkeypatch.setattr(AscendAttention, "latent_sizes", sizes)
    monkeypatch.setattr(AscendAttention, "latent_heads", (4,))


def said(path: Path, device: str, **settings: Any) -> list[tuple[list[int], list[float]]]:
    """The second round finds prefixes."""
    llm = LLM(
        str(path), device=device, dtype="float32", max_total_tokens=4096, context_length=384,
        num_threads=1, disable_piecewise_cuda_graph=True, **settings,
    )  # fmt: skip
    assert llm.info.graphs.failed_sizes == {}
    return [
        (each.token_ids, [entry.logprob for entry in each.logprobs])
        for _ in range(2)
        for each in llm.generate(PROMPTS, GREEDY)
    ]


@pytest.mark.parametrize(
    ("chunk", "decodes"),
    [
        *((48, "full"), (2048, "disabled")),
        pytest.param(48, "disabled", marks=pytest.mark.slow),
        pytest.param(2048, "full", marks=pytest.mark.slow),
    ],
)
def test_steps_of_all_kinds_equal_the_cpu(
    path: Path, simnpu: Any, monkeypatch: pytest.MonkeyPatch, decodes: str, chunk: int
) -> None:
    fused: list[int] = []
    run = latent_attention.run_decodes

    def counted(q: torch.Tensor, *others: Any) -> torch.Tensor:
        fused.append(len(q))
        return run(q, *others)

    monkeypatch.setattr(latent_attention, "run_decodes", counted)
    graphs = {"cuda_graph_backend_decode": decodes, "cuda_graph_bs": "1,4"}
    ours = said(path, "npu", chunked_prefill_size=chunk, **graphs)
    assert fused
    for (tokens, logprobs), (wanted, exact) in zip(ours, said(path, "cpu"), strict=True):
        assert tokens == wanted and logprobs == pytest.approx(exact, abs=1e-4)


@pytest.mark.parametrize(
    ("heads", "sizes", "taken"),
    [(32, (512, 64), True), (16, (512, 64), False), (32, (256, 64), False)],
)
def test_limits_of_the_op_documentation(
    heads: int, sizes: tuple[int, int], taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    layout = KVLayout(
        num_heads=heads, num_kv_heads=1, key_size=sum(sizes), value_size=sizes[0], scale=0.1,
        dtype=torch.bfloat16, latent=True,
    )  # fmt: skip
    assert (AscendAttention.obstacle(layout) is None) == taken


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("glm_moe_dsa", INDEXED),
        pytest.param("gemma3n_text", GEMMA3N, marks=pytest.mark.slow),
    ],
)
def test_choices_of_tokens_and_shared_caches_equal_the_cpu(
    name: str, sizes: dict[str, Any], tmp_path: Path, simnpu: Any
) -> None:
    """The cache keeps the parts of a vector apart, and a choice is read from there."""
    folder = make_tiny_model(tmp_path / "model", name, **sizes)
    ours, wanted = said(folder, "npu", chunked_prefill_size=48), said(folder, "cpu")
    for (tokens, logprobs), (others, exact) in zip(ours, wanted, strict=True):
        assert tokens == others and logprobs == pytest.approx(exact, abs=1e-4)
