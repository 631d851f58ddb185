"""What is particular to models of latent attention: one vector of a token, whatever keeps it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from quantized_checkpoints import SIZES, edit_config, make_fp8, said
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny_model

from piecework.runtime.config.model import ModelConfig
from piecework.runtime.llm import LLM
from tests.runtime.models.sizes import INDEXED, LATENT

WIDE = {
    **LATENT,
    **SIZES,
    "kv_lora_rank": 128,
    "q_lora_rank": 128,
    "v_head_dim": 32,
    "moe_intermediate_size": 128,
    "initializer_range": 0.05,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models"), "deepseek_v3", **WIDE)


@pytest.fixture(scope="module")
def exact(folder: Path) -> list[list[float]]:
    return said(folder, attention_backend="torch")


def mean_difference(one: list[list[float]], other: list[list[float]]) -> float:
    pairs = [
        abs(a - b) for rows in zip(one, other, strict=True) for a, b in zip(*rows, strict=True)
    ]
    return sum(pairs) / len(pairs)


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("cache", ["auto", "fp8_e4m3"])
def test_a_cache_of_fewer_bits_says_about_the_same(
    folder: Path, exact: list[list[float]], backend: str, cache: str
) -> None:
    settings = {"attention_backend": backend, "kv_cache_dtype": cache, "chunked_prefill_size": 16}
    assert mean_difference(said(folder, dtype="bfloat16", **settings), exact) < 0.1


def test_a_cache_of_int8_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="--kv-cache-dtype int8 does not support latent attention"):
        LLM(str(folder), kv_cache_dtype="int8", max_total_tokens=256)


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32"])
def test_blocks_of_float8_beside_routers_of_16_bits_are_served(name: str, tmp_path: Path) -> None:
    """And beside weights of an index's heads, of which nothing says so either."""
    sizes = WIDE if name == "deepseek_v3" else {**INDEXED, **WIDE, "index_topk": 512}
    exact = said(make_tiny_model(tmp_path / "exact", name, **sizes), attention_backend="torch")
    quantised = make_fp8(tmp_path, block=True, architecture=name, **sizes)
    widened = said(quantised, quantization="none")
    assert 0 < mean_difference(widened, exact) < 0.1
    assert 0 < mean_difference(said(quantised), widened) < 0.1


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("cache", ["auto", "fp8_e4m3"])
def test_a_choice_of_tokens_is_made_beside_a_cache_of_fewer_bits(
    backend: str, cache: str, tmp_path: Path
) -> None:
    """As exactly as fewer bits let it be: some choices are close."""
    folder = make_tiny_model(tmp_path, "glm_moe_dsa", **{**INDEXED, **WIDE})
    exact = said(folder)
    settings = {"attention_backend": backend, "kv_cache_dtype": cache, "chunked_prefill_size": 16}
    rounded = said(folder, **settings)
    assert mean_difference(rounded, exact) < (1e-3 if cache == "auto" else 0.1)


def test_a_text_that_is_no_longer_than_the_choice_sees_all_of_it(tmp_path: Path) -> None:
    """As the same weights without an index do."""
    folder = make_tiny_model(tmp_path, "deepseek_v32", **{**INDEXED, **WIDE, "index_topk": 128})
    dense = tmp_path / "dense"
    dense.mkdir()
    for file in folder.glob("*.json"):
        (dense / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if ".indexer." not in name}
    save_file(kept, dense / "model.safetensors")
    edit_config(dense, architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3")
    assert said(folder) == said(dense)


@pytest.mark.parametrize(
    "changes",
    [
        {"indexer_types": ["full"]},
        {"indexer_types": ["shared", "full", "full"]},
        {"indexer_types": ["full", "some", "full"]},
        {"q_lora_rank": None},
        {"index_head_dim": 8},
        {"index_topk": 0},
    ],
)
def test_an_index_that_makes_no_sense_is_told(changes: dict[str, Any], tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "glm_moe_dsa", **INDEXED)
    edit_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=r"(index|q_lora).*; download the model again"):
        ModelConfig.from_pretrained(tmp_path)


def test_decodes_that_choose_are_not_recorded(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "deepseek_v32", **INDEXED)
    settings = {"attention_backend": "torch", "cuda_graph_backend_decode": "full"}
    with pytest.raises(ValueError, match=r"a model without sparse attention: take disabled"):
        said(folder, **settings)


def test_kimi_k2_is_deepseek_v3_under_its_own_name(
    folder: Path, exact: list[list[float]], tmp_path: Path
) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    edit_config(tmp_path, model_type="kimi_k2")
    assert said(tmp_path, attention_backend="torch") == exact
